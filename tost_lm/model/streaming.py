"""Texts of any length, read tile by tile: memory holds one tile and the state.

The state of a TSSA layer has a constant size. Softmax layers keep the keys and values of their window, or of all tokens
without a window: only with a window is memory constant. Between tiles, the sums of TSSA are float64, as in decoding
(`tssa_step`), so that they do not drift.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from tost_lm.model.block import LMOutput, LMState

TILE_TOKENS = 4096

Tokens: TypeAlias = Tensor | np.ndarray | Iterable[int | Tensor | np.ndarray]
"""Ids in a one-dimensional tensor or array, in an iterable of these, or one by one."""


class StreamingModel(Protocol):
    """A model that is called as `TostLM` is."""

    def __call__(self, tokens_BT: Tensor, labels: Tensor | None = None, state: LMState | None = None) -> LMOutput:
        """Arguments and results of `TostLM`, but with labels there may be no state."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class TokenStream(Iterator[Tensor]):
    """Iterates over the nats of each token of one text, given all tokens before it: float64 [n] on the host per tile.

    The first id is context only, usually the end of text, so there is one number fewer than ids:

        stream = model.stream([eot, *ids])
        mean = sum(nats.sum() for nats in stream) / len(ids)

    Between tiles and after the last one, `state` is the state after all ids so far except `last`. To continue, pass
    `last` first:

        more = model.stream([stream.last, *others], stream.state)  # in the same tiles as one stream
        logits_11V = model(torch.tensor([[stream.last]]), state=stream.state).logits
    """

    def __init__(
        self, model: StreamingModel, tokens: Tokens, state: LMState | None = None, tile_tokens: int = TILE_TOKENS
    ):
        """
        Args:
            model: in evaluation mode.
            tokens: read on demand; may be a generator over a file of any size.
            state: after the tokens before these, one row; None: empty.
            tile_tokens: tokens that are scored at once. Changes memory and time, not the result.

        Raises:
            ConfigError: during iteration: the text is longer than the model's positions, as in `TostLM`.
            ValueError: `tile_tokens` is not positive; during iteration: ids are not integers in one dimension.
        """
        empty = getattr(model, "empty_state", None)  # of another library, whose first call else returns no state
        self.state = to_running_dtype(empty(1) if state is None and empty else state)
        self.last: int | None = None
        """None before the first id."""
        self._nats = self._read(model, in_tiles(tokens, tile_tokens, first=1))

    def __next__(self) -> Tensor:
        return next(self._nats)

    @torch.no_grad()
    def _read(self, model: StreamingModel, tiles: Iterator[Tensor]) -> Iterator[Tensor]:
        device = _device(model)
        for ids_1T in overlapping_tiles(tiles):
            last, ids_1T = int(ids_1T[0, -1]), ids_1T.to(device)
            if ids_1T.shape[1] == 1:
                self.last = last
                continue
            output = model(ids_1T[:, :-1], labels=ids_1T[:, 1:], state=self.state)
            assert output.nats is not None
            self.last, self.state = last, to_running_dtype(output.state)
            yield output.nats[0].cpu().double()


@torch.no_grad()
def prefill(model: StreamingModel, tiles: Iterable[Tensor], state: LMState | None = None) -> LMOutput:
    """Read sequences tile by tile, and compute logits at their last token only.

    Args:
        model: in evaluation mode.
        tiles: ids, each [B, n] with n ≥ 1; `in_tiles` makes them for one sequence.
        state: after the tokens before these, unchanged; None: empty.

    Returns:
        The output for the last token: logits [B, 1, V], and the state after it.

    Raises:
        ConfigError: the sequences are longer than the model's positions.
        ValueError: there are no tokens.
    """
    device, last_B1, state = _device(model), None, to_running_dtype(state)
    for ids_BT in overlapping_tiles(tiles):
        last_B1 = ids_BT[:, -1:].to(device)
        if ids_BT.shape[1] > 1:
            state = to_running_dtype(model(ids_BT[:, :-1].to(device), state=state).state)
    if last_B1 is None:
        raise ValueError("there are no tokens to read; give at least one")
    return model(last_B1, state=state)


def in_tiles(tokens: Tokens, size: int, first: int | None = None) -> Iterator[Tensor]:
    """Ids as int64 tensors [1, size]; the first one has `first` ids if that is given, and the last one may be shorter.

    Raises:
        ValueError: `size` is not positive; during iteration: ids are not integers in one dimension.
    """
    if size < 1:
        raise ValueError(f"tiles have {size} tokens; give 1 or more")
    return _tiles([tokens] if isinstance(tokens, Tensor | np.ndarray) else tokens, size, first or size)


def overlapping_tiles(tiles: Iterable[Tensor]) -> Iterator[Tensor]:
    """Each tile [B, n], with the last column of the previous tile in front."""
    last_B1 = None
    for tile in tiles:
        ids_BT = tile if last_B1 is None else torch.cat([last_B1, tile], 1)
        last_B1 = ids_BT[:, -1:]
        yield ids_BT


def to_running_dtype(state: LMState | None) -> LMState | None:
    """The state with its sums in float64, for any number of further tokens; a cache of another library is unchanged."""
    if state is None:
        return None
    return state.map(lambda layer: layer.to_running_dtype() if hasattr(layer, "to_running_dtype") else layer)


def _tiles(arrays: Iterable[Any], size: int, first: int) -> Iterator[Tensor]:
    buffer, filled, full = np.empty(size, np.int64), 0, first
    for array in arrays:
        rest = _ids(array)
        while len(rest):
            taken = rest[: full - filled]
            buffer[filled : filled + len(taken)] = taken
            filled, rest = filled + len(taken), rest[len(taken) :]
            if filled == full:
                yield torch.from_numpy(buffer[:full].copy())[None]
                filled, full = 0, size
    if filled:
        yield torch.from_numpy(buffer[:filled].copy())[None]


def _ids(array: Any) -> np.ndarray:
    ids = np.atleast_1d(array.numpy(force=True) if isinstance(array, Tensor) else array)
    if ids.ndim > 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"ids must be integers in one dimension, got {ids.dtype} {list(ids.shape)}")
    return ids


def _device(model: StreamingModel) -> torch.device:
    return next(model.parameters()).device
