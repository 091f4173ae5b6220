"""The output of the language model: loss, state after the tokens, and logits on request."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from tost_lm.model.block import MixerState


class LMState(NamedTuple):
    """The model's state after some tokens of N documents."""

    layers: tuple[MixerState, ...]
    """The state of each layer, N rows."""
    positions: tuple[int, ...]
    """Number of tokens so far, [N]; rows may differ."""


class LMOutput(NamedTuple):
    """The output of one call of the model."""

    loss: Tensor | None
    """Mean nats per counted label, and `z_loss`; None without labels."""
    nats: Tensor | None
    """Loss of each token [B, T], 0 where the label is not counted; float32 or float64, without gradient."""
    is_top: Tensor | None
    """Whether no token has a larger logit than the label [B, T], False where it is not counted; None with gradients."""
    state: LMState | None
    """The state after the last token; None if not requested."""
    compute_logits: Callable[[], Tensor]
    """Computes the logits. With tensor or sequence ranks, all ranks must call it."""
    z_loss: Tensor | None = None
    """The z-loss in `loss`, without gradient; 0 without a coefficient (`Head.z_loss`) or without gradients."""

    @property
    def logits(self) -> Tensor:
        """[B, T, V], computed on each access: a call whose logits are not read never allocates them."""
        return self.compute_logits()
