"""What evaluation asks of a model: ours on one rank or several, or another library's."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from tost_lm.model import LMOutput, LMState


class ModelFacts(Protocol):
    """What is known of a model beside its weights."""

    @property
    def max_positions(self) -> int:
        """Tokens that it was trained to read at once: a window."""
        ...

    @property
    def position_limit(self) -> int | None:
        """Tokens that it can read at all; None: any number."""
        ...

    @property
    def pattern(self) -> str:
        """What its layers are made of."""
        ...

    @property
    def window(self) -> int | None:
        """How far its softmax layers look back; None: to the beginning."""
        ...


class LanguageModel(Protocol):
    """In evaluation mode; on several ranks, all of one copy of the model call it with the same arguments."""

    @property
    def config(self) -> ModelFacts: ...

    def __call__(self, tokens_BT: Tensor, labels: Tensor | None = None, state: LMState | None = None) -> LMOutput:
        """As `TostLM`; with labels the state may be left out."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...
