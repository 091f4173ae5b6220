"""The public operator: causal Token Statistics Self-Attention with state in and state out."""

import os
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from tost_lm.ops import chunked, chunked_phases, naive
from tost_lm.ops.autograd import CausalTssa, Passes
from tost_lm.ops.composed import Composed
from tost_lm.ops.layout import document_layout, whole_numbers
from tost_lm.ops.naive import Membership, TssaState, check_membership, check_state, statistics_dtype
from tost_lm.ops.phases import HeadsOfRows, HeadSoftmax, LocalSoftmax, SequenceShard, UniformMemberships
from tost_lm.ops.split import Pieces

Backend = Literal["naive", "chunked", "triton"]


def causal_tssa(
    w: Tensor,
    temp: Tensor,
    bias: Tensor | None = None,
    *,
    membership: Membership = "energy-share",
    initial_state: TssaState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend | None = None,
    shard: SequenceShard | None = None,
    heads: HeadSoftmax | None = None,
) -> tuple[Tensor, TssaState | None]:
    """Causal TSSA (arXiv 2412.17810, in the released causal form).

    With w² squared channel by channel and sums over the document up to and including token t:
    S1 = Σ w²; z = temp·Σ_d(w²/S1 + bias); Π = softmax over heads of z; y = −Π·w / (1 + ΣΠw² / (ΣΠ + 1e-8)).

    Backends, which agree in outputs, states and gradients:
        `triton`: fused kernels, for CUDA tensors in float32, bfloat16 or float16 of up to 64 heads of up to 256
            channels. Picked for them when Triton is installed.
        `chunked`: PyTorch, chunk by chunk, on every device and in every dtype. Picked for everything else. A packed
            document is a walk of its own: hundreds of documents of a few tokens take longer than with `naive`. Short
            rows of one length share walks.
        `naive`: the formulas as written, through autograd; keeps about ten tensors of w's size. Never picked.
    All of them keep statistics, scores and memberships in float32 (float64 for float64 inputs), under autocast too.

    Args:
        w: [B, T, H, D], T ≥ 1, any floating dtype.
        temp: [H].
        bias: per head and token, already gathered by position in the document: [H, T] or [B, H, T]. It is added
            to every channel's share, so under `energy-share` it counts D times; under `energy-mean` once.
        membership: how a token's score comes about. `energy-share` as published; `energy-mean` divides by the
            running mean of w² instead of the running sum and averages over channels; `uniform` sets Π = 1/H.
        initial_state: statistics of the tokens before these, differentiable; None: nothing came before.
        output_final_state: return the state after the last token, differentiable; else None.
        cu_seqlens: int32 [N + 1], offsets of N packed documents; needs B == 1 and covers T; each starts afresh
            (or from its row of `initial_state`). A padded batch, left or right, is served by packing it. Best on the
            host: each call reads them, and would wait for a device.
        backend: None picks one as above.
        shard: the tokens are a shard of sequences that lie on several ranks (`tost_lm.parallel.sequence`). Then T is
            of the shard, cu_seqlens of the whole sequence, and a state of all documents in it: the same on every rank,
            and so are the gradients that come in for the final and go out for the initial one.
        heads: the heads are some of those that lie on several ranks (`tost_lm.parallel.tensor`); H counts them here.

    Returns:
        y [B, T, H, D] in w's dtype, and the final state (N rows when packed, else B) or None. The final state is
        float64 where w or the initial state is, else float32.

    Raises:
        ValueError: shapes that do not fit, an unknown membership or backend, or a backend that cannot run here.
    """
    _check_shapes(w, temp, bias, membership)
    B, T, H, D = w.shape
    pieces = Pieces.of(cu_seqlens, B, T, shard.split if shard else None)
    state = initial_state or TssaState.empty(len(pieces.whole_lengths), H, D, like=w)
    check_state(state, len(pieces.whole_lengths), H, D)
    chosen = _choose(backend, w)
    with torch.autocast(w.device.type, enabled=False):
        dtype = statistics_dtype(w)
        bias_BHT = None if bias is None else bias.to(dtype).expand(B, H, T)
        inputs = (w, temp.to(dtype), bias_BHT, membership, state, pieces)
        if chosen == "naive":
            if shard or heads:
                raise ValueError("backend 'naive' has no tokens or heads on other ranks; None picks one that can")
            y, final_state = _naive(*inputs)
        else:
            rows = not pieces.packed or initial_state is not None or output_final_state
            passes = _passes(chosen, pieces, shard, rows, apart=bool(shard or heads))
            if heads is None and membership == "uniform":
                heads = UniformMemberships(H)
            walk = partial(_fast, passes, heads)
            if passes is chunked and not pieces.packed and _count_alike(state, membership):
                walk = partial(_rows_together, heads or LocalSoftmax(), chunked.rows_in_chunk(w))
            y, final_state = walk(*inputs)
    return y, final_state if output_final_state else None


def _naive(
    w: Tensor,
    temp_H: Tensor,
    bias_BHT: Tensor | None,
    membership: Membership,
    state: TssaState,
    pieces: Pieces,
) -> tuple[Tensor, TssaState]:
    bias_BTH = None if bias_BHT is None else bias_BHT.transpose(1, 2)
    if len(w) == len(state.mass):
        return naive.causal_tssa(w, temp_H, bias_BTH, membership, state)
    ys, states = [], []
    for n, (start, end) in enumerate(pairwise(pieces.offsets)):
        bias = None if bias_BTH is None else bias_BTH[:, start:end]
        row = TssaState(*(part[n : n + 1] for part in state))
        y, after = naive.causal_tssa(w[:, start:end], temp_H, bias, membership, row)
        ys.append(y)
        states.append(after)
    return torch.cat(ys, 1), TssaState(*(torch.cat(parts) for parts in zip(*states, strict=True)))


def _passes(backend: str, pieces: Pieces, shard: SequenceShard | None, rows: bool, apart: bool) -> Passes:
    if backend == "chunked" and not apart:
        return chunked
    if backend == "chunked":
        phases = chunked_phases
    else:
        from tost_lm.ops import triton as phases  # an optional package, and slow to import
    return Composed(phases, pieces, shard, rows)


def _fast(
    passes: Passes,
    softmax: HeadSoftmax | None,
    w: Tensor,
    temp_H: Tensor,
    bias_BHT: Tensor | None,
    membership: Membership,
    state: TssaState,
    pieces: Pieces,
) -> tuple[Tensor, TssaState]:
    B, T, H, D = w.shape
    layout = document_layout(pieces.offsets, passes.chunk_tokens(H, D, w.device), w.device)
    statistics = (x.to(torch.promote_types(x.dtype, temp_H.dtype)) for x in state[:3])
    y_MHD, energy, weighted, mass = CausalTssa.apply(
        passes,
        layout,
        softmax,
        membership,
        state.count[pieces.documents] + whole_numbers(pieces.before, w.device),
        w.reshape(B * T, H, D).contiguous(),
        temp_H,
        bias_BHT,
        *statistics,
    )
    count_N = state.count + whole_numbers(pieces.whole_lengths, w.device)
    return y_MHD.view(B, T, H, D), TssaState(energy, weighted, mass, count_N)


def _count_alike(state: TssaState, membership: Membership) -> bool:
    """Whether the number of earlier tokens, where scores depend on it, is the same for all rows."""
    return membership != "energy-mean" or bool((state.count == state.count[0]).all())


def _rows_together(
    softmax: HeadSoftmax,
    rows: int,
    w: Tensor,
    temp_H: Tensor,
    bias_BHT: Tensor | None,
    membership: Membership,
    state: TssaState,
    pieces: Pieces,
) -> tuple[Tensor, TssaState]:
    """Rows of one length as heads of one row, `rows` at a time: one walk for those, where each would need its own."""
    if rows < 2 or len(w) < 2:
        return _fast(chunked, softmax, w, temp_H, bias_BHT, membership, state, pieces)
    T, H = w.shape[1:3]
    heads, one_row, ys, states = HeadsOfRows(H, softmax), Pieces.of(None, 1, T, None), [], []
    for b in range(0, len(w), rows):
        w_bTHD = w[b : b + rows]
        bias_1LT = None if bias_BHT is None else bias_BHT[b : b + rows].reshape(1, -1, T)
        energy, weighted, mass = (x[b : b + rows].flatten(0, 1)[None] for x in state[:3])
        before = TssaState(energy, weighted, mass, state.count[:1])
        w_1TLD = w_bTHD.transpose(0, 1).flatten(1, 2)[None]
        y_1TLD, after = _fast(chunked, heads, w_1TLD, temp_H.repeat(len(w_bTHD)), bias_1LT, membership, before, one_row)
        ys.append(y_1TLD[0].unflatten(1, (-1, H)).transpose(0, 1))
        states.append([x[0].unflatten(0, (-1, H)) for x in after[:3]])
    energy, weighted, mass = (torch.cat(parts) for parts in zip(*states, strict=True))
    return torch.cat(ys), TssaState(energy, weighted, mass, state.count + T)


def _choose(backend: Backend | None, w: Tensor) -> Backend:
    obstacle = _triton_obstacle(w)
    if backend is None:
        return "triton" if w.is_cuda and not obstacle else "chunked"
    if backend not in get_args(Backend):
        raise ValueError(f"backend {backend!r} is none of {', '.join(get_args(Backend))}; None picks one")
    if backend == "triton" and obstacle:
        raise ValueError(f"backend 'triton' cannot run here: {obstacle}; None picks one that can")
    return backend


def _triton_obstacle(w: Tensor) -> str | None:
    if not find_spec("triton"):
        return "the package triton is not installed"
    if not w.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"w is on {w.device}, and its kernels run on CUDA devices"
    if w.dtype == torch.float64:
        return "its statistics are float32, too few digits for float64 inputs"
    if w.shape[2] > 64 or w.shape[3] > 256:
        return f"w has {w.shape[2]} heads of {w.shape[3]} channels, and its kernels hold up to 64 of 256"
    return None


def _check_shapes(w: Tensor, temp: Tensor, bias: Tensor | None, membership: str) -> None:
    if w.dim() != 4 or 0 in w.shape or not w.is_floating_point():
        raise ValueError(f"w must be floating point [B, T, H, D], T ≥ 1 and none 0, got {w.dtype} {list(w.shape)}")
    B, T, H, _ = w.shape
    if temp.shape != (H,):
        raise ValueError(f"temp must be [H] = [{H}], got {list(temp.shape)}")
    if bias is not None and bias.shape not in ((H, T), (B, H, T)):
        raise ValueError(f"bias must be [H, T] = [{H}, {T}] or [B, H, T], got {list(bias.shape)}")
    check_membership(membership)
