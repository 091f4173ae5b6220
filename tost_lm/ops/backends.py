"""The three backends of causal TSSA, each from one call of the operator to y and the final state.

Shapes as in `phases`: M = B·T tokens of a flat sequence, H heads, D channels a head, n of N documents on this rank.
"""

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from tost_lm.ops import chunked, chunked_phases, naive
from tost_lm.ops.autograd import CausalTssa, Passes
from tost_lm.ops.layout import LocalDocuments, SequenceShard, document_layout, int64_tensor
from tost_lm.ops.naive import Membership, TssaState
from tost_lm.ops.phases import HeadsOfRows, HeadSoftmax, LocalSoftmax, PhasedBackend, UniformMemberships


@dataclass(frozen=True)
class Call:
    """The checked arguments of one call."""

    w_BTHD: Tensor
    temp_H: Tensor
    """temp_H and bias_BHT are in the statistics dtype."""
    bias_BHT: Tensor | None
    membership: Membership
    state: TssaState | None
    """Before the tokens; None: empty, and no final state is asked for."""
    local: LocalDocuments
    shard: SequenceShard | None
    """None: all tokens are on this rank."""
    heads: HeadSoftmax | None
    """None: all heads are on this rank."""

    def with_state(self) -> TssaState:
        """`state`, or the empty one."""
        H, D = self.w_BTHD.shape[2:]
        return self.state or TssaState.empty(len(self.local.whole_lengths), H, D, like=self.w_BTHD)


class Backend(Protocol):
    """One implementation of the operator."""

    name: str

    def obstacle(self, call: Call) -> str | None:
        """The reason why this backend cannot run the call, or None."""
        ...

    def run(self, call: Call) -> tuple[Tensor, TssaState | None]:
        """y [B, T, H, D] and the state after the last token, at least where `call` has a state."""
        ...


class Naive:
    """The formulas as written, differentiated by autograd."""

    name = "naive"

    def obstacle(self, call: Call) -> str | None:
        return "it cannot use tokens or heads of other ranks" if call.shard or call.heads else None

    def run(self, call: Call) -> tuple[Tensor, TssaState]:
        bias_BTH, state = None if call.bias_BHT is None else call.bias_BHT.transpose(1, 2), call.with_state()
        if not call.local.packed:
            return naive.causal_tssa(call.w_BTHD, call.temp_H, bias_BTH, call.membership, state)
        ys, states = [], []
        for n, (start, end) in enumerate(pairwise(call.local.offsets)):
            bias = None if bias_BTH is None else bias_BTH[:, start:end]
            row = TssaState(*(x[n : n + 1] for x in state))
            y, after = naive.causal_tssa(call.w_BTHD[:, start:end], call.temp_H, bias, call.membership, row)
            ys.append(y)
            states.append(after)
        return torch.cat(ys, 1), TssaState(*(torch.cat(xs) for xs in zip(*states, strict=True)))


class Chunked:
    """PyTorch, chunk by chunk, on every device and in every dtype."""

    name = "chunked"

    def obstacle(self, call: Call) -> str | None:
        return None

    def run(self, call: Call) -> tuple[Tensor, TssaState | None]:
        if call.shard or call.heads:
            return _run(PhasedBackend(chunked_phases, call.local, call.shard), call)
        call = replace(call, state=call.with_state())
        rows = chunked.rows_in_chunk(call.w_BTHD)
        if min(rows, len(call.w_BTHD)) > 1 and not call.local.packed and _counts_are_equal(call):
            return _run_rows_together(call, rows)
        return _run(chunked, call)


def obstacle_to_triton(w_BTHD: Tensor) -> str | None:
    """The reason why the Triton kernels cannot read w, or None."""
    if not find_spec("triton"):
        return "the package triton is not installed"
    if not w_BTHD.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"w is on {w_BTHD.device}, but its kernels run on CUDA devices"
    if w_BTHD.dtype == torch.float64:
        return "its statistics are float32, too few digits for float64 inputs"
    _, _, H, D = w_BTHD.shape
    if H > 64 or D > 256:
        return f"w has {H} heads of {D} channels, but its kernels support up to 64 of 256"
    return None


class Triton:
    """Fused kernels for CUDA devices."""

    name = "triton"

    def obstacle(self, call: Call) -> str | None:
        return obstacle_to_triton(call.w_BTHD)

    def run(self, call: Call) -> tuple[Tensor, TssaState | None]:
        from tost_lm.ops import triton  # an optional package, and slow to import

        return _run(PhasedBackend(triton, call.local, call.shard), call)


NAIVE, CHUNKED, TRITON = Naive(), Chunked(), Triton()
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (NAIVE, CHUNKED, TRITON)}


def _run(passes: Passes, call: Call) -> tuple[Tensor, TssaState | None]:
    """Apply `CausalTssa` with the passes of a backend."""
    w, state, local, heads = call.w_BTHD, call.state, call.local, call.heads
    B, T, H, D = w.shape
    if heads is None and call.membership == "uniform":
        heads = UniformMemberships(H)
    layout = document_layout(local.offsets, passes.chunk_tokens(H, D, w.device), w.device)
    count_n, initial = int64_tensor(local.before, w.device), []
    if state is not None:
        count_n = count_n + state.count[local.documents]
        initial = [x.to(torch.promote_types(x.dtype, call.temp_H.dtype)) for x in state[:3]]
    y_MHD, *final = CausalTssa.apply(  # pyright: ignore[reportGeneralTypeIssues]
        passes,
        layout,
        heads,
        call.membership,
        count_n,
        w.reshape(B * T, H, D).contiguous(),
        call.temp_H,
        call.bias_BHT,
        *initial,
    )
    if state is None:
        return y_MHD.view(B, T, H, D), None
    count_N = state.count + int64_tensor(local.whole_lengths, w.device)
    return y_MHD.view(B, T, H, D), TssaState(*final, count=count_N)


def _counts_are_equal(call: Call) -> bool:
    """Whether all rows have the same number of earlier tokens, or scores do not depend on it."""
    count_N = call.with_state().count
    return call.membership != "energy-mean" or bool((count_N == count_N[0]).all())


def _run_rows_together(call: Call, rows: int) -> tuple[Tensor, TssaState]:
    """Process `rows` short rows of equal length in one pass, side by side as heads of one row."""
    T, H = call.w_BTHD.shape[1:3]
    of_a_row = UniformMemberships(H) if call.membership == "uniform" else LocalSoftmax()
    softmax, one_row, state = HeadsOfRows(H, of_a_row), LocalDocuments.of(None, 1, T, None), call.with_state()
    ys, states = [], []
    for b in range(0, len(call.w_BTHD), rows):
        w_bTHD = call.w_BTHD[b : b + rows]
        energy, weighted, mass = (x[b : b + rows].flatten(0, 1)[None] for x in state[:3])
        together = replace(
            call,
            w_BTHD=w_bTHD.transpose(0, 1).flatten(1, 2)[None],
            temp_H=call.temp_H.repeat(len(w_bTHD)),
            bias_BHT=None if call.bias_BHT is None else call.bias_BHT[b : b + rows].reshape(1, -1, T),
            state=TssaState(energy, weighted, mass, state.count[:1]),
            local=one_row,
            heads=softmax,
        )
        y_1TLD, after = _run(chunked, together)
        assert after is not None
        ys.append(y_1TLD[0].unflatten(1, (-1, H)).transpose(0, 1))
        states.append([x[0].unflatten(0, (-1, H)) for x in after[:3]])
    energy, weighted, mass = (torch.cat(xs) for xs in zip(*states, strict=True))
    return torch.cat(ys), TssaState(energy, weighted, mass, state.count + T)
