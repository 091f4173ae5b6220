"""The three backends of causal TSSA, each from one call of the operator to y and the final state.

Shapes as in `phases`: M = B·T tokens of a flat sequence, H heads, D channels a head, n of N documents on this rank.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.mixers.tssa import chunked, naive
from tost_lm.mixers.tssa.autograd import CausalTssa
from tost_lm.mixers.tssa.naive import Membership, TssaState
from tost_lm.mixers.tssa.phases import PhasedBackend, UniformMemberships
from tost_lm.ops.layout import LocalDocuments, SequenceShard, document_layout, int64_tensor


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
        return _run(PhasedBackend(chunked, call.local, call.shard), call)


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
        from tost_lm.mixers.tssa import triton  # an optional package, and slow to import

        return _run(PhasedBackend(triton, call.local, call.shard), call)


NAIVE, CHUNKED, TRITON = Naive(), Chunked(), Triton()
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (NAIVE, CHUNKED, TRITON)}


def _run(passes: PhasedBackend, call: Call) -> tuple[Tensor, TssaState | None]:
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
