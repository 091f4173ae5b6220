"""The model's state as a cache of the Hugging Face library."""

from functools import partial

import torch
from torch import Tensor
from transformers import Cache

from tost_lm.mixers.state import mapped
from tost_lm.model.block import LMState


class TostCache(Cache):
    """The state after the tokens read so far. For TSSA layers its size does not depend on their number.

    Forward replaces `state`. No state changes, although those of full softmax layers share memory: a `copy.copy` of the
    cache is independent.
    """

    state: LMState | None
    """One row per sequence of the batch; None before the first token."""
    columns: int
    """Tokens per row so far, with padding; the positions of `state` count without padding."""
    is_compileable = is_croppable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_linear = (False,)  # else `generate` reads the known tokens again  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens per row so far, with padding."""
        return self.columns

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.columns = None, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`, int64 [n], in that order."""
        if self.state is not None:
            positions = self.state.positions
            equal = len(set(positions)) == 1  # avoids a copy from the device
            kept = positions[:1] * len(indices) if equal else tuple(positions[row] for row in indices.tolist())
            select = partial(mapped, change=lambda x_N: x_N.index_select(0, indices.to(x_N.device)))
            self.state = self.state.map(select)._replace(positions=kept)

    reorder_cache = batch_select_indices  # pyright: ignore[reportAssignmentType]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, copies next to each other."""
        if self.state is not None:
            self.batch_select_indices(torch.arange(len(self.state.positions)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError unless `tokens_to_remove` is 0: sums over tokens cannot be undone."""
        if tokens_to_remove:
            raise ValueError(f"TostCache: the last {abs(tokens_to_remove)} tokens cannot be removed from its state")
