"""The interface of a mixer's layer. Shapes: B sequences, T tokens, C channels, H heads, M = B·T, N documents."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from tost_lm.mixers.state import SharedState, mapped
from tost_lm.ops.positions import SequenceInfo
from tost_lm.torch_internals import call

ROOM_TOKENS = 256
"""Tokens between two copies of a state that grows in decoding. It is also the most memory that is never used."""


def room_after(tokens: int, kept: int | None) -> int:
    """Tokens that such a state has memory for after `tokens` tokens. It keeps the last `kept` of them; None: all."""
    room = (tokens // ROOM_TOKENS + 1) * ROOM_TOKENS
    return room if kept is None else min(room, kept)


class HeadSoftmax:
    """The softmax over the heads of one rank; `tost_lm.parallel.tensor.SoftmaxOverRanks` is that of several."""

    def forward(self, z_MH: Tensor) -> Tensor:
        """Scores → memberships."""
        return z_MH.softmax(-1)

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        """Memberships and their gradient → gradient of the scores, Π·(dΠ − Σ_h Π·dΠ).

        The result does not change when a number is subtracted from dΠ of all heads. That is dΠ of the largest Π:
        where Π is nearly 1, as at a document's first token, the two terms are else equal, and float32 cancels.
        """
        d_pi_MH = d_pi_MH - d_pi_MH.gather(-1, pi_MH.argmax(-1, keepdim=True))
        return pi_MH * (d_pi_MH - (pi_MH * d_pi_MH).sum(-1, keepdim=True))


class TokenMixer(nn.Module):
    """A layer between two projections, `in_proj` and `out_proj`. It is built from a `MixerShape`."""

    State: type[Any]
    """A NamedTuple of tensors, [N, …], and of such states; a method `to_running_dtype`, if it needs one, prepares it
    for any number of further tokens."""
    TileState: ClassVar[type[SharedState] | None] = None
    """The state between tiles of training, if it is shared."""
    OF_HEADS: tuple[str, ...] = ()
    """Parameters with a row for each head, beside the projections."""
    FIXED_STATE: ClassVar[bool] = False
    """Whether a step of one token a row works in place: its new state has the shapes and dtypes of the one before, and
    it reads no values of tensors and only `position` and `local` of `info`. Decoding is one CUDA graph if all mixers
    of a model have it."""
    eager: Callable[..., Any] = staticmethod(call)
    """Calls a function with arguments, under torch.compile outside of graphs: for loops, documents and messages between
    ranks, of which it would make many graphs."""
    heads: int
    groups: tuple[int, ...] = (1,)
    """Relative sizes of the tensors that `in_proj` computes one after the other, each with channels of all heads."""
    in_proj: Any
    out_proj: Any

    def forward(self, x_BTC: Tensor, state: Any, info: SequenceInfo) -> tuple[Tensor, Any]:
        """Mix the tokens, given the state after earlier tokens; the new state is None unless `info` asks for it."""
        raise NotImplementedError

    def fixed_state(self, state: Any, positions: Sequence[int]) -> Any:
        """A copy of a state after `positions` tokens of each row, which steps update in place."""
        return mapped(state, Tensor.clone)

    def is_tile(self, state: Any, info: SequenceInfo) -> bool:
        """Whether a call begins or continues a shared state between tiles."""
        shared = self.TileState
        return shared is not None and (isinstance(state, shared) or info.output_state == "last")

    def split_heads(self, ranks: int, softmax: HeadSoftmax) -> None:
        """Keep a rank's part of the heads; the projections and `OF_HEADS` are split by the caller.

        Args:
            softmax: a softmax over the heads of all ranks.
        """
        self.heads //= ranks

    def missing_kernels(self) -> str | None:
        """The reason why the layer is slow on its GPU, with the fix; None: it has all kernels, or is on a CPU."""
        return None
