"""The public operator: causal Token Statistics Self-Attention with state in and state out."""

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from tost_lm.ops import naive
from tost_lm.ops.naive import Membership, TssaState


def causal_tssa(
    w: Tensor,
    temp: Tensor,
    bias: Tensor | None = None,
    *,
    membership: Membership = "energy-share",
    initial_state: TssaState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Literal["naive"] | None = None,
) -> tuple[Tensor, TssaState | None]:
    """Causal TSSA (arXiv 2412.17810, in the released causal form). One backend so far, on every device: `naive`.

    With w² squared channel by channel and sums over the document up to and including token t:
    S1 = Σ w²; z = temp·Σ_d(w²/S1 + bias); Π = softmax over heads of z; y = −Π·w / (1 + ΣΠw² / (ΣΠ + 1e-8)).

    Args:
        w: [B, T, H, D], T ≥ 1, any floating dtype; statistics are kept in float32 (float64 for float64).
        temp: [H].
        bias: per head and token, already gathered by position in the document: [H, T] or [B, H, T]. It is added
            to every channel's share, so under `energy-share` it counts D times; under `energy-mean` once.
        membership: how a token's score comes about. `energy-share` as published; `energy-mean` divides by the
            running mean of w² instead of the running sum and averages over channels; `uniform` sets Π = 1/H.
        initial_state: statistics of the tokens before these, differentiable; None: nothing came before.
        output_final_state: return the state after the last token, differentiable; else None.
        cu_seqlens: int32 [N + 1], offsets of N packed documents; needs B == 1 and covers T; each starts afresh
            (or from its row of `initial_state`).
        backend: None picks one for the device.

    Returns:
        y [B, T, H, D] in w's dtype, and the final state (N rows when packed, else B) or None.

    Raises:
        ValueError: shapes that do not fit, an unknown membership or backend.
    """
    _check(w, temp, bias, membership, cu_seqlens, backend)
    B, T, H, D = w.shape
    bias_BTH = None if bias is None else bias.expand(B, H, T).transpose(1, 2)
    documents = B if cu_seqlens is None else len(cu_seqlens) - 1
    state = initial_state or TssaState.empty(documents, H, D, like=w)
    if len(state.mass) != documents:
        raise ValueError(f"initial_state holds {len(state.mass)} documents, the input {documents}")
    if cu_seqlens is None:
        y, final_state = naive.causal_tssa(w, temp, bias_BTH, membership, state)
    else:
        y, final_state = _packed(w, temp, bias_BTH, membership, state, cu_seqlens.tolist())
    return y, final_state if output_final_state else None


def tssa_step(
    w_t: Tensor,
    temp: Tensor,
    bias_t: Tensor | None,
    state: TssaState,
    *,
    membership: Membership = "energy-share",
) -> tuple[Tensor, TssaState]:
    """One token in constant memory: w_t [B, H, D], bias_t [H] or [B, H] or None → y_t [B, H, D] and the new state."""
    bias_BH1 = None if bias_t is None else bias_t[..., None]
    y, state_after = causal_tssa(
        w_t[:, None], temp, bias_BH1, membership=membership, initial_state=state, output_final_state=True
    )
    assert state_after is not None
    return y[:, 0], state_after


def _packed(
    w: Tensor, temp: Tensor, bias_BTH: Tensor | None, membership: Membership, state: TssaState, offsets: list[int]
) -> tuple[Tensor, TssaState]:
    ys, states = [], []
    for n, (start, end) in enumerate(pairwise(offsets)):
        bias = None if bias_BTH is None else bias_BTH[:, start:end]
        row = TssaState(*(part[n : n + 1] for part in state))
        y, after = naive.causal_tssa(w[:, start:end], temp, bias, membership, row)
        ys.append(y)
        states.append(after)
    return torch.cat(ys, 1), TssaState(*(torch.cat(parts) for parts in zip(*states, strict=True)))


def _check(
    w: Tensor,
    temp: Tensor,
    bias: Tensor | None,
    membership: str,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> None:
    if w.dim() != 4 or w.shape[1] == 0:
        raise ValueError(f"w must be [B, T, H, D] with T ≥ 1, got {list(w.shape)}")
    B, T, H, _ = w.shape
    if temp.shape != (H,):
        raise ValueError(f"temp must be [H] = [{H}], got {list(temp.shape)}")
    if bias is not None and bias.shape not in ((H, T), (B, H, T)):
        raise ValueError(f"bias must be [H, T] = [{H}, {T}] or [B, H, T], got {list(bias.shape)}")
    if membership not in ("energy-share", "energy-mean", "uniform"):
        raise ValueError(f"membership {membership!r} is none of energy-share, energy-mean, uniform")
    if backend not in (None, "naive"):
        raise ValueError(f"backend {backend!r} is not available here; choose naive or None")
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        if B != 1 or offsets[0] != 0 or offsets[-1] != T or sorted(set(offsets)) != offsets:
            raise ValueError(f"cu_seqlens must rise from 0 to T = {T} with B == 1 and no empty document")
