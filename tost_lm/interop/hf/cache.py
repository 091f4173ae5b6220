"""The model's state as a cache of the Hugging Face library."""

from torch import Tensor

from tost_lm.interop.hf.modeling_tost import TostCache as CacheOfPublishedForm
from tost_lm.mixers.state import mapped
from tost_lm.model.block import LMState


class TostCache(CacheOfPublishedForm):
    """The state after the tokens read so far. For TSSA layers its size does not depend on their number.

    Forward replaces `state`. No state changes, although those of full softmax layers share memory: a `copy.copy` of the
    cache is independent.
    """

    state: LMState | None
    """One row per sequence of the batch; None before the first token."""
    columns: int
    """Tokens per row so far, with padding; `positions` counts without padding."""

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.columns = None, 0

    @property
    def positions(self) -> tuple[int, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens per row so far, without padding; None before the first token."""
        return self.state and self.state.positions

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`, int64 [n], in that order."""
        self.state = self.state and select_rows(self.state, indices)

    reorder_cache = batch_select_indices  # pyright: ignore[reportAssignmentType]


def select_rows(state: LMState, rows: Tensor) -> LMState:
    """The rows at `rows`, int64 [n]."""
    equal = len(set(state.positions)) == 1  # avoids a copy from the device
    positions = state.positions[:1] * len(rows) if equal else tuple(state.positions[row] for row in rows.tolist())
    selected = state.map(lambda layer: mapped(layer, lambda x_N: x_N.index_select(0, rows.to(x_N.device))))
    return selected._replace(positions=positions)
