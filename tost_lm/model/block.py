"""The transformer block: x + γ1·mixer(norm(x)), then x + γ2·mlp(norm(x)), or norm(mixer(x)) and norm(mlp(x)); and the
output of a model of blocks: loss, state after the tokens, and logits on request.

The residual stream x is float32 or wider whatever the weights' dtype, as under autocast. In bfloat16 it would round
away what a branch with a small γ adds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.state import parts
from tost_lm.model.config import ModelConfig
from tost_lm.ops.initialization import InitialValue, set_own_constants
from tost_lm.ops.norms import ZeroCenteredRmsNorm
from tost_lm.ops.positions import SequenceInfo
from tost_lm.torch_internals import call, call_outside_of_graphs, compiled

MixerState = Any
"""The state of a mixer's layer, a tuple of tensors."""
CheckpointWrapper = Callable[..., Any]
"""Takes a function and its arguments and returns the function's result. May compute it again in the backward."""


def build_norm(config: ModelConfig) -> nn.LayerNorm | nn.RMSNorm:
    """A norm of the residual stream."""
    if config.norm == "layer":
        return nn.LayerNorm(config.width, eps=config.norm_epsilon, bias=config.bias)
    return (nn.RMSNorm if config.norm == "rms" else ZeroCenteredRmsNorm)(config.width, eps=config.norm_epsilon)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm of x, which is rounded to the weights' dtype first: in bfloat16, half the memory."""
    return norm(x.to(norm.weight.dtype))  # pyright: ignore[reportArgumentType, reportCallIssue]


class LayerScale(nn.Module):
    """A learned factor per channel of a branch's output."""

    def __init__(self, width: int, initial: float):
        super().__init__()
        self.initial = initial
        self.gamma = nn.Parameter(torch.empty(width))
        set_own_constants(self)

    def initial_values(self) -> dict[str, InitialValue]:
        return {"gamma": self.initial}

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * self.gamma


class Mlp(nn.Module):
    groups: tuple[int, ...] = (1,)
    """Relative sizes of the tensors that `in_proj` computes, in order."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden = config.mlp_width
        self.in_proj = nn.Linear(config.width, len(self.groups) * hidden, bias=config.bias)
        self.out_proj = nn.Linear(hidden, config.width, bias=config.bias)
        self.approximation = {"exact": "none", "tanh": "tanh"}[config.gelu]

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.out_proj(gelu(self.in_proj(x_BTC), approximate=self.approximation))


class SwigluMlp(Mlp):
    """silu(gate) · up (arXiv 2002.05202)."""

    groups = (1, 1)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, up = self.in_proj(x_BTC).chunk(2, -1)
        return self.out_proj(silu(gate) * up)


MLP_OF = {"gelu": Mlp, "swiglu": SwigluMlp}


class Block(nn.Module):
    """A block of a token mixer and an MLP."""

    def __init__(self, config: ModelConfig, mixer: TokenMixer, *, norm_after: bool = False):
        """`norm_after`: the norms are applied to the outputs of the branches instead of their inputs."""
        super().__init__()
        self.norm_after = norm_after
        self.mixer_norm = build_norm(config)
        self.mixer = mixer
        self.mixer_scale = _layer_scale(config)
        self.mlp_norm = build_norm(config)
        self.mlp = MLP_OF[config.mlp](config)
        self.mlp_scale = _layer_scale(config)
        self._compiled: Callable[..., Any] | None = None
        self._compiled_add: Callable[..., Any] | None = None
        self.set_checkpoints()

    def set_checkpoints(self, whole: CheckpointWrapper = call, mlp: CheckpointWrapper = call) -> None:
        """Set the wrappers of the whole block and of its MLP branch, where tokens do not interact, so that it may call
        the function on tiles of tokens."""
        self._checkpoint, self._mlp_checkpoint = whole, mlp

    def compile_inside(self) -> None:
        """Compile `compute`, but of a tile whose mixer shares its state with other tiles only what follows the mixer: a
        graph holds no list of tensors that grows."""
        self._compiled, self._compiled_add = compiled(self.compute), compiled(self._add)
        self.mixer.eager = call_outside_of_graphs()

    def forward(self, x_BTC: Tensor, state: MixerState | None, info: SequenceInfo) -> tuple[Tensor, MixerState | None]:
        if self.mixer.is_tile(state, info):
            return self._checkpoint(self.compute, x_BTC, state, info, self._compiled_add)
        return self._checkpoint(self._compiled or self.compute, x_BTC, state, info)

    def compute(
        self,
        x_BTC: Tensor,
        state: MixerState | None,
        info: SequenceInfo,
        add: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """The block without the wrapper around it; `add` in place of `_add`."""
        mixed_BTC, new_state = self.mixer(self.branch_input(x_BTC, self.mixer_norm), state, info)
        return (add or self._add)(x_BTC, mixed_BTC), new_state

    def _add(self, x_BTC: Tensor, mixed_BTC: Tensor) -> Tensor:
        """Both branches added to the residual stream, given the result of the mixer."""
        x_BTC = x_BTC + self.mixer_scale(self.branch_output(mixed_BTC, self.mixer_norm))
        return self._mlp_checkpoint(self._add_mlp, x_BTC)

    def _add_mlp(self, x_BTC: Tensor) -> Tensor:
        y_BTC = self.mlp(self.branch_input(x_BTC, self.mlp_norm))
        return x_BTC + self.mlp_scale(self.branch_output(y_BTC, self.mlp_norm))

    def branch_input(self, x_BTC: Tensor, norm: Any) -> Tensor:
        """The input of the mixer or MLP from the residual stream, in the weights' dtype."""
        return x_BTC.to(norm.weight.dtype) if self.norm_after else normed(norm, x_BTC)

    def branch_output(self, y_BTC: Tensor, norm: nn.Module) -> Tensor:
        """The result of mixer or MLP before LayerScale."""
        return normed(norm, y_BTC) if self.norm_after else y_BTC


def _layer_scale(config: ModelConfig) -> nn.Module:
    return LayerScale(config.width, config.layer_scale) if config.layer_scale else nn.Identity()


class LMState(NamedTuple):
    """The model's state after some tokens of N documents."""

    layers: tuple[MixerState, ...]
    """The state of each layer, N rows."""
    positions: tuple[int, ...]
    """Number of tokens so far, [N]; rows may differ."""

    def map(self, change: Callable[[MixerState], MixerState]) -> "LMState":
        """The states of all layers changed."""
        return LMState(tuple(map(change, self.layers)), self.positions)


@dataclass
class FixedState:
    """The model's state after some tokens of B rows, in memory that a call with one more token a row updates."""

    layers: list[MixerState]
    """States of mixers with `FIXED_STATE`."""
    position_B: Tensor
    """Number of tokens so far, int64; rows may differ."""

    def update(self, layers: Sequence[MixerState]) -> None:
        """Add a token, after which the layers have these states. Raises ValueError if they have other shapes."""
        for old, new in zip(self.layers, layers, strict=True):
            if old is new:
                continue  # the mixer has updated it
            for x, y in zip(parts(old), parts(new), strict=True):
                if x is y:
                    continue
                if (x.shape, x.dtype) != (y.shape, y.dtype):
                    raise ValueError(
                        f"{type(old).__name__}: a step changes {x.dtype} {list(x.shape)} to {y.dtype} {list(y.shape)}; "
                        "set FIXED_STATE = False in its mixer"
                    )
                x.copy_(y)
        self.position_B += 1

    def make_room(self, kept: int | None) -> None:
        """Copy the states that grow to more memory; they keep the last `kept` tokens, or all."""
        for i, layer in enumerate(self.layers):
            if hasattr(layer, "with_room"):
                self.layers[i] = layer.with_room(kept)


class LMOutput(NamedTuple):
    """The output of one call of the model."""

    loss: Tensor | None
    """Mean nats per counted label, and in training the z-loss; None without labels."""
    nats: Tensor | None
    """Loss of each token [B, T], 0 where the label is not counted; float32 or float64, without gradient."""
    is_top: Tensor | None
    """Whether no token has a larger logit than the label [B, T], False where it is not counted; None with gradients."""
    state: LMState | None
    """The state after the last token; None if not requested, or after a step of a `FixedState`."""
    compute_logits: Callable[[], Tensor]
    """Computes the logits. With tensor or sequence ranks, all ranks must call it."""
    scalars: Mapping[str, Tensor] = {}
    """Numbers of a training step by name, without gradient, each a sum over tokens divided as the loss: `loss` without
    z-loss, and what the head and the layers report. They are the same names in each call."""

    @property
    def logits(self) -> Tensor:
        """[B, T, V], computed on each access: a call whose logits are not read never allocates them."""
        return self.compute_logits()
