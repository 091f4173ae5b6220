"""The model's state as the Hugging Face library hands it on from call to call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from tost_lm.model.lm import LMState
from tost_lm.model.softmax import KeyValueState


class TostCache(Cache):
    """What a model keeps of the tokens so far; of TSSA layers the same size after any number of them.

    Forward replaces `state` and changes no tensor of it: a `copy.copy` of the cache can be gone on with apart from it.
    """

    is_compileable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_croppable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: LMState | None = None
        """A row for each of the batch; None: no token was read."""
        self.columns = 0
        """Tokens of a row so far, padding among them; `state.positions` counts without it."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of all calls so far, with padding."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """−1: any."""
        return -1

    @property
    def batch_size(self) -> int:
        """Rows, −1 before the first token."""
        return -1 if self.state is None else len(self.state.positions)

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.columns = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row n be what row beam_idx[n] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`, int64, in their order."""
        self.state = self.state and select_rows(self.state, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put each row there `repeats` times, copies beside each other."""
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError unless nothing is to be removed: statistics of tokens do not tell one from the other."""
        if tokens_to_remove:
            raise ValueError(f"TostCache: the last {abs(tokens_to_remove)} tokens cannot be taken out of its state")


def select_rows(state: LMState, rows: Tensor) -> LMState:
    """The rows at `rows`, int64 [n]."""
    alike = len(set(state.positions)) == 1  # nothing to be read from the device
    positions = state.positions[:1] * len(rows) if alike else tuple(state.positions[row] for row in rows.tolist())
    return LMState(_each(lambda x_N: x_N.index_select(0, rows.to(x_N.device)), state), positions)


def put_rows(state: LMState | None, rows: Tensor, new: LMState, count: int) -> LMState:
    """`state` of `count` rows (None: nothing was read yet) with the n rows of `new` in place of those at `rows`."""
    positions = list(state.positions if state else [0] * count)
    for row, position in zip(rows.tolist(), new.positions, strict=True):
        positions[row] = position
    if state is None:
        state = LMState(_each(lambda x_N: x_N.new_zeros(count, *x_N.shape[1:]), new), ())
    layers = []
    for old_layer, new_layer in zip(state.layers, new.layers, strict=True):
        old_layer, new_layer = _equally_long(old_layer, new_layer)
        pairs = zip(old_layer, new_layer, strict=True)
        layers.append(type(new_layer)(*(old_N.index_copy(0, rows, new_N) for old_N, new_N in pairs)))
    return LMState(tuple(layers), tuple(positions))


def _each(change: Callable[[Tensor], Tensor], state: LMState) -> tuple[Any, ...]:
    """The layers with each of their tensors changed."""
    return tuple(type(layer)(*map(change, layer)) for layer in state.layers)


def _equally_long(*layers: Any) -> list[Any]:
    """Keys and values of as many tokens, on the right behind zeros; other states as they are."""
    if not isinstance(layers[0], KeyValueState):
        return list(layers)
    S = max(layer.key.shape[2] for layer in layers)
    return [KeyValueState(*(pad(x_NHSD, (0, 0, S - x_NHSD.shape[2], 0)) for x_NHSD in layer)) for layer in layers]
