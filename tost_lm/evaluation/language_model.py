"""Interface of a model in evaluation: ours on one or several ranks, or one of another library."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from tost_lm.model import LMOutput, LMState


class ModelFacts(Protocol):
    """Facts about a model beside its weights."""

    @property
    def max_positions(self) -> int:
        """Tokens that it was trained to read at once, the default window."""
        ...

    @property
    def position_limit(self) -> int | None:
        """Maximum number of tokens; None: unlimited."""
        ...

    @property
    def pattern(self) -> str:
        """Types of its layers."""
        ...

    @property
    def window(self) -> int | None:
        """Window of its softmax layers; None: unlimited."""
        ...


class LanguageModel(Protocol):
    """A model in evaluation mode. All ranks of one copy of the model call it with the same arguments."""

    @property
    def config(self) -> ModelFacts: ...

    def __call__(self, tokens_BT: Tensor, labels: Tensor | None = None, state: LMState | None = None) -> LMOutput:
        """As `TostLM`, but with labels there may be no state."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...
