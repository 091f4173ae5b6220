"""A block: x + γ1·mixer(norm(x)), then x + γ2·mlp(norm(x))."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from tost_lm.model.config import ModelConfig
from tost_lm.model.gated import GatedMixer, GatedState
from tost_lm.model.positions import Places
from tost_lm.model.softmax import KeyValueState, SoftmaxMixer
from tost_lm.model.tssa import TssaMixer
from tost_lm.ops import TssaState

MixerState = TssaState | KeyValueState | GatedState

MIXER_OF = {"T": TssaMixer, "A": SoftmaxMixer, "G": GatedMixer}
STATE_OF = {"T": TssaState, "A": KeyValueState, "G": GatedState}

Way = Callable[..., Any]
"""How to compute something: called with a function and its arguments, gives what the function gives."""


def plainly(compute: Callable[..., Any], *arguments: Any) -> Any:
    return compute(*arguments)


class LayerScale(nn.Module):
    """A learned factor per channel around a branch of the block."""

    def __init__(self, width: int, initial: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * self.gamma


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.in_proj = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.out_proj = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.approximation = {"exact": "none", "tanh": "tanh"}[config.gelu]

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.out_proj(gelu(self.in_proj(x_BTC), approximate=self.approximation))


class Block(nn.Module):
    """A block whose mixer is TSSA (`letter` T), softmax attention (A) or gated linear attention (G)."""

    def __init__(self, config: ModelConfig, letter: str):
        super().__init__()
        self.mixer_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mixer = MIXER_OF[letter](config)
        self.mixer_scale = _layer_scale(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = Mlp(config)
        self.mlp_scale = _layer_scale(config)
        self.way: Way = plainly
        """Of all of it."""
        self.mlp_way: Way = plainly
        """Of the MLP's branch, whose tokens know nothing of each other: it may be called on some of them."""

    def forward(self, x_BTC: Tensor, state: MixerState | None, places: Places) -> tuple[Tensor, MixerState | None]:
        return self.way(self._compute, x_BTC, state, places)

    def _compute(self, x_BTC: Tensor, state: MixerState | None, places: Places) -> tuple[Tensor, MixerState | None]:
        mixed_BTC, new_state = self.mixer(self.mixer_norm(x_BTC), state, places)
        return self.mlp_way(self._add_mlp, x_BTC + self.mixer_scale(mixed_BTC)), new_state

    def _add_mlp(self, x_BTC: Tensor) -> Tensor:
        return x_BTC + self.mlp_scale(self.mlp(self.mlp_norm(x_BTC)))


def _layer_scale(config: ModelConfig) -> nn.Module:
    return LayerScale(config.width, config.layer_scale) if config.layer_scale else nn.Identity()
