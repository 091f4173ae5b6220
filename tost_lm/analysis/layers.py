"""The TSSA layers of a model, and watching them while it reads.

Shapes: B rows, T tokens, H heads, D channels per head, C channels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tost_lm.model import LMState, TostLM
from tost_lm.model.block import Block
from tost_lm.model.positions import Places
from tost_lm.model.streaming import carried
from tost_lm.model.tssa import TssaMixer
from tost_lm.ops import TssaState
from tost_lm.ops.naive import memberships, statistics_dtype, token_scores

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

PIECE_TOKENS = 2048


@dataclass(frozen=True)
class LayerPiece:
    """What one TSSA layer does with the tokens of one call; its rows begin at one position."""

    layer: int
    """From 0 on, TSSA layers alone."""
    block: Block
    mixer: TssaMixer
    x_BTC: Tensor
    """The residual stream before the block."""
    z_BTC: Tensor
    """What the mixer reads, behind the block's norm."""
    y_BTC: Tensor
    """What the mixer gives."""
    state: TssaState | None
    places: Places

    @property
    def here(self) -> slice:
        """Where these tokens stand in their rows."""
        start = self.places.starts[0]
        return slice(start, start + self.z_BTC.shape[1])

    @cached_property
    def projected(self) -> Tensor:
        """w [B, T, H, D]."""
        return projected(self.mixer, self.z_BTC)

    @cached_property
    def scores(self) -> Tensor:
        """z [B, T, H], from which the memberships are made, float64."""
        return scores_of(self.mixer, self.projected, self.state, self.places).double()

    @cached_property
    def pi(self) -> Tensor:
        """Π [B, T, H], float64."""
        return memberships(self.scores, self.mixer.membership)

    @property
    def branch(self) -> Tensor:
        """What the mixer adds to the residual stream [B, T, C]."""
        return self.block.mixer_scale(self.y_BTC)


See = Callable[[LayerPiece], None]


def tssa_mixers(model: TostLM) -> list[TssaMixer]:
    """Their mixers, in the order in which they are called."""
    return [module for module in model.modules() if isinstance(module, TssaMixer)]


@torch.inference_mode()
def read(model: TostLM, tokens_BT: Tensor, see: See, state: LMState | None = None) -> LMState:
    """Read rows of any length, and show each piece of each TSSA layer, layer by layer and piece by piece.

    Memory is that of a piece and of the model's state. Returns the state after the last token.
    """
    with watched(model, see):
        for piece_BT in tokens_BT.split(PIECE_TOKENS, dim=1):
            state = carried(model(piece_BT, state=state).state)
    assert state is not None
    return state


@contextmanager
def watched(model: TostLM, see: See) -> Iterator[None]:
    """While the block lasts, show what each TSSA layer does with the tokens of each call."""
    blocks = [block for block in model.modules() if isinstance(block, Block) and isinstance(block.mixer, TssaMixer)]
    streams: list[Tensor] = []

    def before(block: Any, arguments: Any) -> None:
        streams.append(arguments[0])

    def after(layer: int, block: Block, mixer: TssaMixer, arguments: Any, result: Any) -> None:
        z_BTC, state, places = arguments
        see(LayerPiece(layer, block, mixer, streams.pop(), z_BTC, result[0], state, places))

    of_blocks = [block.register_forward_pre_hook(before) for block in blocks]
    of_mixers = [block.mixer.register_forward_hook(partial(after, i, block)) for i, block in enumerate(blocks)]
    with while_hooked(*of_blocks, *of_mixers):
        yield


@contextmanager
def while_hooked(*hooks: "RemovableHandle") -> Iterator[None]:
    """Take the hooks away when the block ends."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def projected(mixer: TssaMixer, z_BTC: Tensor) -> Tensor:
    """w [B, T, H, D]."""
    return mixer.in_proj(z_BTC).unflatten(-1, (mixer.heads, -1))


def scores_of(mixer: TssaMixer, w_BTHD: Tensor, state: TssaState | None, places: Places) -> Tensor:
    """z [B, T, H], from which Π is made, of a layer that is called with this state at these places."""
    dtype = statistics_dtype(w_BTHD)
    w_sq_BTHD = w_BTHD.to(dtype).square()
    energy_BTHD = w_sq_BTHD.cumsum(1)
    count_BT = torch.arange(1, w_BTHD.shape[1] + 1, device=w_BTHD.device).expand(w_BTHD.shape[:2])
    if state is not None:
        energy_BTHD = energy_BTHD + state.energy[:, None].to(dtype)
        count_BT = count_BT + state.count[:, None]
    bias_HT = mixer.bias_of(places)
    bias_TH = None if bias_HT is None else bias_HT.mT.to(dtype)
    return token_scores(w_sq_BTHD, energy_BTHD, count_BT, mixer.temp.to(dtype), bias_TH, mixer.membership)
