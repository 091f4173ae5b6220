"""The statistics of TSSA, its state, and the scores of tokens.

Source: Token Statistics Transformer (arXiv 2412.17810) and its released language model.
Shapes: B sequences, T tokens, H heads, D channels per head, N documents (N = B unless packed).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.ops.precision import running_dtype, statistics_dtype

ENERGY_FLOOR = 1e-12


class TssaState(NamedTuple):
    """The state of TSSA after some tokens: 2·H·D + H statistics for each document.

    float64 for float64 inputs, else float32.
    """

    energy: Tensor
    """Σ w², [N, H, D]."""
    weighted_energy: Tensor
    """Σ Π·w², [N, H, D]."""
    mass: Tensor
    """Σ Π, [N, H]."""

    def to_running_dtype(self) -> "TssaState":
        """With sums for any number of further tokens."""
        dtype = running_dtype(self.mass.device)
        return TssaState(self.energy.to(dtype), self.weighted_energy.to(dtype), self.mass.to(dtype))

    @staticmethod
    def empty(documents: int, heads: int, channels: int, like: Tensor) -> "TssaState":
        """The state before the first token, on `like`'s device, in the statistics dtype of `like`."""
        zeros = torch.zeros(documents, heads, channels, device=like.device, dtype=statistics_dtype(like))
        return TssaState(zeros, zeros.clone(), zeros[..., 0].clone())


def check_state(state: TssaState, documents: int, heads: int, channels: int) -> None:
    """Raises ValueError if `state` has other numbers of documents, heads or channels."""
    if len(state.mass) != documents:
        raise ValueError(f"the state holds {len(state.mass)} documents, the input {documents}")
    full = (documents, heads, channels)
    for name, shape in zip(TssaState._fields, (full, full, full[:2]), strict=True):
        if getattr(state, name).shape != shape:
            raise ValueError(f"{name} of the state must be {list(shape)}, got {list(getattr(state, name).shape)}")


def token_scores(w_sq_BTHD: Tensor, energy_BTHD: Tensor, temp_H: Tensor, bias_BTH: Tensor | None) -> Tensor:
    """Scores z = temp · Σ_d(w²/S1 + bias), [B, T, H], whose softmax over heads is Π. S1 includes the token itself."""
    z_BTH = (w_sq_BTHD / energy_BTHD.clamp_min(ENERGY_FLOOR)).sum(-1)
    if bias_BTH is not None:  # inside the sum over channels
        z_BTH = z_BTH + bias_BTH * w_sq_BTHD.shape[-1]
    return temp_H * z_BTH
