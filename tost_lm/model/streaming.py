"""Reading texts of any length piece by piece: one piece and the state are all that is held.

What the state keeps of a TSSA layer is the same after any number of tokens. Softmax layers keep the keys and values of
their window, or without one of every token: only with a window is memory constant. The sums of TSSA are carried from
piece to piece in float64, as in decoding (`tssa_step`), so that they do not drift.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from tost_lm.ops import TssaState
from tost_lm.ops.recurrent import running_dtype

if TYPE_CHECKING:
    from tost_lm.model.lm import LMOutput, LMState

PIECE_TOKENS = 4096

Tokens: TypeAlias = Tensor | np.ndarray | Iterable[int | Tensor | np.ndarray]
"""Ids in a one-dimensional tensor or array, or in any number of them, or one by one."""


class Reader(Protocol):
    """What is called as `TostLM` is."""

    def __call__(
        self, tokens_BT: Tensor, labels: Tensor | None = None, state: "LMState | None" = None
    ) -> "LMOutput": ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class TokenStream(Iterator[Tensor]):
    """The nats of each token of one text given all tokens before it, piece by piece: float64 [n] on the host.

    The first id is only context, usually the end of text, so there is one number less than ids:

        stream = model.stream([eot, *ids])
        mean = sum(nats.sum() for nats in stream) / len(ids)

    Between pieces and after them, `state` is what the model keeps of all ids so far but the `last`, which comes first
    in whatever goes on:

        more = model.stream([stream.last, *others], stream.state)
        logits_11V = model(torch.tensor([[stream.last]]), state=stream.state).logits
    """

    def __init__(self, model: Reader, tokens: Tokens, state: "LMState | None" = None, piece_tokens: int = PIECE_TOKENS):
        """
        Args:
            model: in evaluation mode.
            tokens: taken as they are needed; a generator over a file of any size will do.
            state: of the tokens before these, one row; None: there are none.
            piece_tokens: ids that are read at once; it changes memory and time, not the result.

        Raises:
            ConfigError: when iterated over: the text passes the model's positions, as in `TostLM`.
            ValueError: `piece_tokens` is not positive; when iterated over: ids are not whole numbers in one dimension.
        """
        self.state = carried(state)
        self.last: int | None = None
        """None: there were no ids yet."""
        self._nats = self._read(model, in_pieces(tokens, piece_tokens))

    def __next__(self) -> Tensor:
        return next(self._nats)

    @torch.no_grad()
    def _read(self, model: Reader, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        device = _device(model)
        for ids_1T in overlapping(pieces):
            last, ids_1T = int(ids_1T[0, -1]), ids_1T.to(device)
            if ids_1T.shape[1] == 1:
                self.last = last
                continue
            output = model(ids_1T[:, :-1], labels=ids_1T[:, 1:], state=self.state)
            assert output.nats is not None
            self.last, self.state = last, carried(output.state)
            yield output.nats[0].cpu().double()


@torch.no_grad()
def read(model: Reader, pieces: Iterable[Tensor], state: "LMState | None" = None) -> "LMOutput":
    """Read sequences piece by piece, without logits but those that follow them.

    Args:
        model: in evaluation mode.
        pieces: ids, each [B, n] with n ≥ 1; `in_pieces` makes them for one sequence.
        state: of the tokens before these.

    Returns:
        The output on the last token alone: logits [B, 1, V], and the state after it.

    Raises:
        ConfigError: the sequences pass the model's positions.
        ValueError: there are no tokens.
    """
    device, last_B1, state = _device(model), None, carried(state)
    for ids_BT in overlapping(pieces):
        last_B1 = ids_BT[:, -1:].to(device)
        if ids_BT.shape[1] > 1:
            state = carried(model(ids_BT[:, :-1].to(device), state=state).state)
    if last_B1 is None:
        raise ValueError("there are no tokens to read")
    return model(last_B1, state=state)


def in_pieces(tokens: Tokens, size: int) -> Iterator[Tensor]:
    """Ids as int64 tensors [1, size], the last of them perhaps shorter.

    Raises:
        ValueError: `size` is not positive; when iterated over: ids are not whole numbers in one dimension.
    """
    if size < 1:
        raise ValueError(f"pieces of {size} tokens: must be at least 1")
    return _pieces([tokens] if isinstance(tokens, Tensor | np.ndarray) else tokens, size)


def overlapping(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Each piece [B, n] behind the last column of the one before it."""
    last_B1 = None
    for piece in pieces:
        ids_BT = piece if last_B1 is None else torch.cat([last_B1, piece], 1)
        last_B1 = ids_BT[:, -1:]
        yield ids_BT


def carried(state: "LMState | None") -> "LMState | None":
    """A state whose sums can go on for good: those of TSSA in float64."""
    return state and state._replace(layers=tuple(_carried(layer) for layer in state.layers))


def _carried(layer: Any) -> Any:
    if not isinstance(layer, TssaState):
        return layer
    running = running_dtype(layer.mass.device)
    return TssaState(layer.energy.to(running), layer.weighted_energy.to(running), layer.mass.to(running), layer.count)


def _pieces(parts: Iterable[Any], size: int) -> Iterator[Tensor]:
    buffer, filled = np.empty(size, np.int64), 0
    for part in parts:
        rest = _ids(part)
        while len(rest):
            taken = rest[: size - filled]
            buffer[filled : filled + len(taken)] = taken
            filled, rest = filled + len(taken), rest[len(taken) :]
            if filled == size:
                yield torch.from_numpy(buffer.copy())[None]
                filled = 0
    if filled:
        yield torch.from_numpy(buffer[:filled].copy())[None]


def _ids(part: Any) -> np.ndarray:
    ids = np.atleast_1d(part.numpy(force=True) if isinstance(part, Tensor) else part)
    if ids.ndim > 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"ids must be whole numbers in one dimension, got {ids.dtype} {list(ids.shape)}")
    return ids


def _device(model: Reader) -> torch.device:
    return next(model.parameters()).device
