"""TSSA as the formulas are written, in plain PyTorch, differentiated by autograd: the reference of both backends.

Source: Token Statistics Transformer (arXiv 2412.17810) and its released language model. Shapes as in
`tost_lm.mixers.tssa.statistics`.
"""

from itertools import pairwise

import torch
from torch import Tensor

from tost_lm.mixers.tssa.statistics import TssaState, token_scores
from tost_lm.ops.precision import MASS_FLOOR, statistics_dtype


def causal_tssa_naive(
    w: Tensor,
    temp: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: TssaState | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, TssaState]:
    """`causal_tssa` in one process: y [B, T, H, D] and the final state; bias [H, T], of rows [B, H, T], or None."""
    bias_1TH = None if bias is None else bias.mT.reshape(-1, *bias.mT.shape[-2:])
    if cu_seqlens is None:
        state = initial_state or TssaState.empty(len(w), *w.shape[2:], like=w)
        return _documents(w, temp, bias_1TH, state)
    offsets = cu_seqlens.tolist()
    initial = initial_state or TssaState.empty(len(offsets) - 1, *w.shape[2:], like=w)
    ys, states = [], []
    for n, (start, end) in enumerate(pairwise(offsets)):
        row = TssaState(*(x[n : n + 1] for x in initial))
        bias_1tH = None if bias_1TH is None else bias_1TH[:, start:end]
        y, after = _documents(w[:, start:end], temp, bias_1tH, row)
        ys.append(y)
        states.append(after)
    return torch.cat(ys, 1), TssaState(*(torch.cat(xs) for xs in zip(*states, strict=True)))


def _documents(
    w_BTHD: Tensor, temp_H: Tensor, bias_BTH: Tensor | None, initial_state: TssaState
) -> tuple[Tensor, TssaState]:
    """Causal TSSA of B documents, each after the tokens of its initial state: y [B, T, H, D] and the final state."""
    dtype = statistics_dtype(w_BTHD)
    w_sq_BTHD = w_BTHD.to(dtype).square()
    energy_BTHD = initial_state.energy[:, None] + w_sq_BTHD.cumsum(1)
    bias_BTH = None if bias_BTH is None else bias_BTH.to(dtype)
    pi_BTH = token_scores(w_sq_BTHD, energy_BTHD, temp_H.to(dtype), bias_BTH).softmax(-1)
    weighted_BTHD = initial_state.weighted_energy[:, None] + (pi_BTH[..., None] * w_sq_BTHD).cumsum(1)
    mass_BTH = initial_state.mass[:, None] + pi_BTH.cumsum(1)
    second_moment_BTHD = weighted_BTHD / (mass_BTH + MASS_FLOOR)[..., None]
    y_BTHD = -(pi_BTH[..., None] * w_BTHD.to(dtype)) / (1 + second_moment_BTHD)
    state = TssaState(energy_BTHD[:, -1], weighted_BTHD[:, -1], mass_BTH[:, -1])
    return y_BTHD.to(w_BTHD.dtype), state
