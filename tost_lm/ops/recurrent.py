"""Causal TSSA one token at a time, with a state of constant size."""

import torch
from torch import Tensor

from tost_lm.ops.autograd import SoftmaxOverHeads
from tost_lm.ops.naive import (
    MASS_FLOOR,
    Membership,
    TssaState,
    check_membership,
    check_state,
    memberships,
    running_dtype,
    statistics_dtype,
    token_scores,
)
from tost_lm.ops.phases import HeadSoftmax


def tssa_step(
    w_t: Tensor,
    temp: Tensor,
    bias_t: Tensor | None,
    state: TssaState,
    *,
    membership: Membership = "energy-share",
    heads: HeadSoftmax | None = None,
) -> tuple[Tensor, TssaState]:
    """One token after those of `state`: the result of `causal_tssa` for T = 1, differentiable.

    The returned state is float64 (float32 on mps, which has no float64): after some hundred thousand tokens, a new
    token is too small to change a float32 sum.

    Args:
        w_t: [B, H, D].
        temp: [H].
        bias_t: [H], [B, H] or None.
        state: statistics of the tokens before this one.
        membership: as in `causal_tssa`.
        heads: as in `causal_tssa`.

    Returns:
        y_t [B, H, D] in w_t's dtype, and the state that includes the token.

    Raises:
        ValueError: shapes that do not fit, or an unknown membership.
    """
    B, H, D = w_t.shape
    check_state(state, B, H, D)
    check_membership(membership)
    if temp.shape != (H,) or (bias_t is not None and bias_t.shape not in ((H,), (B, H))):
        bias_shape = None if bias_t is None else list(bias_t.shape)
        raise ValueError(f"temp must be [H] = [{H}] and bias_t [H] or [B, H], got {list(temp.shape)} and {bias_shape}")
    dtype = statistics_dtype(w_t)
    running = running_dtype(w_t.device)
    with torch.autocast(w_t.device.type, enabled=False):
        w_BHD = w_t.to(dtype)
        w_sq_BHD = w_BHD.square()
        energy_BHD = state.energy.to(running) + w_sq_BHD
        count_B = state.count + 1
        bias_BH = None if bias_t is None else bias_t.to(dtype)
        z_BH = token_scores(w_sq_BHD, energy_BHD.to(dtype), count_B, temp.to(dtype), bias_BH, membership)
        pi_BH = memberships(z_BH, membership) if heads is None else SoftmaxOverHeads.apply(heads, z_BH)
        weighted_BHD = state.weighted_energy.to(running) + pi_BH[..., None] * w_sq_BHD
        mass_BH = state.mass.to(running) + pi_BH
        second_moment_BHD = weighted_BHD.to(dtype) / (mass_BH.to(dtype) + MASS_FLOOR)[..., None]
        y_BHD = -(pi_BH[..., None] * w_BHD) / (1 + second_moment_BHD)
    return y_BHD.to(w_t.dtype), TssaState(energy_BHD, weighted_BHD, mass_BH, count_B)
