"""The statistics of TSSA, its state, and the scores and memberships of tokens.

Source: Token Statistics Transformer (arXiv 2412.17810) and its released language model.
Shapes: B sequences, T tokens, H heads, D channels per head, N documents (N = B unless packed).
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tost_lm.ops.precision import running_dtype, statistics_dtype

Membership = Literal["energy-share", "energy-mean", "uniform"]

ENERGY_FLOOR = 1e-12


class TssaState(NamedTuple):
    """The state of TSSA after some tokens: 2·H·D + H statistics and a token count for each document.

    float64 for float64 inputs, else float32.
    """

    energy: Tensor
    """Σ w², [N, H, D]."""
    weighted_energy: Tensor
    """Σ Π·w², [N, H, D]."""
    mass: Tensor
    """Σ Π, [N, H]."""
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Tokens so far, [N], int64."""

    def to_running_dtype(self) -> "TssaState":
        """With sums for any number of further tokens."""
        dtype = running_dtype(self.mass.device)
        return TssaState(self.energy.to(dtype), self.weighted_energy.to(dtype), self.mass.to(dtype), self.count)

    @staticmethod
    def empty(documents: int, heads: int, channels: int, like: Tensor) -> "TssaState":
        """The state before the first token, on `like`'s device, in the statistics dtype of `like`."""
        zeros = torch.zeros(documents, heads, channels, device=like.device, dtype=statistics_dtype(like))
        count = torch.zeros(documents, device=like.device, dtype=torch.int64)
        return TssaState(zeros, zeros.clone(), zeros[..., 0].clone(), count)


def check_state(state: TssaState, documents: int, heads: int, channels: int) -> None:
    """Raises ValueError if `state` has other numbers of documents, heads or channels."""
    if len(state.mass) != documents:
        raise ValueError(f"the state holds {len(state.mass)} documents, the input {documents}")
    full = (documents, heads, channels)
    for name, shape in zip(TssaState._fields, (full, full, full[:2], full[:1]), strict=True):
        if getattr(state, name).shape != shape:
            raise ValueError(f"{name} of the state must be {list(shape)}, got {list(getattr(state, name).shape)}")
    if state.count.is_floating_point():
        raise ValueError(f"count of the state must be integers, got {state.count.dtype}")


def check_membership(membership: str) -> None:
    """Raises ValueError if `membership` is unknown."""
    if membership not in get_args(Membership):
        raise ValueError(f"unknown membership: {membership!r}; use one of {', '.join(get_args(Membership))}")


def token_scores(
    w_sq_BTHD: Tensor,
    energy_BTHD: Tensor,
    count_BT: Tensor,
    temp_H: Tensor,
    bias_BTH: Tensor | None,
    membership: Membership,
) -> Tensor:
    """Scores z = temp · Σ_d(w²/S1 + bias), [B, T, H]. S1 and the count include the token itself."""
    shares_BTHD = w_sq_BTHD / energy_BTHD.clamp_min(ENERGY_FLOOR)
    if membership == "energy-share":
        z_BTH = shares_BTHD.sum(-1)
        if bias_BTH is not None:  # inside the sum over channels
            z_BTH = z_BTH + bias_BTH * w_sq_BTHD.shape[-1]
    else:
        z_BTH = shares_BTHD.mean(-1) * count_BT[..., None]
        if bias_BTH is not None:
            z_BTH = z_BTH + bias_BTH
    return temp_H * z_BTH


def memberships(z_BTH: Tensor, membership: Membership) -> Tensor:
    """Π [B, T, H]: the softmax of the scores over heads, or 1/H."""
    return torch.full_like(z_BTH, 1 / z_BTH.shape[-1]) if membership == "uniform" else z_BTH.softmax(-1)
