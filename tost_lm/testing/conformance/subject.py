"""The mixer with drawn weights that the equalities are tested on."""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.registry import mixer_class
from tost_lm.mixers.shape import MixerShape
from tost_lm.model.config import ModelConfig
from tost_lm.ops.layout import SequenceShard
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.rotary import Rotary
from tost_lm.torch_internals import pytree

State = Any
"""The state of the layer, and the number of tokens so far, which the layer gets as positions; rows are documents."""

TOKENS = "tokens"
"""The name of x among the inputs."""
WEIGHT_NOISE = 0.1
BOUND = 1e-10
"""The largest relative difference that holds."""


class Subject:
    """A layer in float64 with drawn weights and noise on each, so that those that start at 0 do not hide an error.

    Args:
        window: a token depends on itself and the window − 1 tokens before it only; None: on all tokens before it.
    """

    def __init__(self, kind: type[TokenMixer], shape: MixerShape, rotary: Rotary | None, window: int | None):
        self.arguments = kind, shape, rotary, window
        """Other processes, which know no plugin by its letter, make a subject of these."""
        self.width, self.rotary, self.window = shape.width, rotary, window
        self.generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.mixer = kind(shape).double()  # pyright: ignore[reportCallIssue]
            self.parameters = dict(self.mixer.named_parameters())
            with torch.no_grad():
                for parameter in self.parameters.values():
                    parameter += WEIGHT_NOISE * torch.randn(parameter.shape).to(parameter)

    @classmethod
    def of(cls, letter: str, config: ModelConfig) -> "Subject":
        """The layer that `letter` has in a pattern."""
        window = config.kept_tokens or None
        return cls(mixer_class(letter), config.shape_of(letter), config.rotary, window)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def tokens(self, B: int, T: int) -> Tensor:
        return self.draw(B, T, self.width)

    def states(self, documents: int) -> State:
        """States after different numbers of tokens, 1 to 5."""
        with torch.no_grad():
            return concatenate([self(self.tokens(1, 1 + 3 * n % 5))[1] for n in range(1, documents + 1)])

    def __call__(
        self,
        x_BTC: Tensor,
        state: State | None = None,
        offsets: Sequence[int] | None = None,
        shard: SequenceShard | None = None,
        output_state: bool = True,
    ) -> tuple[Tensor, State | None]:
        """Outputs and final states. The first documents continue from the rows of `state`, the others start empty."""
        layer_state, positions = (None, None) if state is None else (state[0], state[1].tolist())
        documents = len(x_BTC) if offsets is None else len(offsets) - 1
        if positions is not None:
            positions += [0] * (documents - len(positions))
        cu_seqlens = None if offsets is None else torch.tensor(offsets)
        info = SequenceInfo.of(x_BTC[..., 0], positions, cu_seqlens, shard, output_state)
        y_BTC, layer_state = self.mixer(x_BTC, layer_state, info.with_rotary(self.rotary, x_BTC.dtype))
        return y_BTC, (layer_state, torch.tensor(info.end_positions)) if output_state else None

    def results(
        self, call: Callable[..., tuple[Tensor, State | None]], x_BTC: Tensor, state: State | None = None
    ) -> dict[str, Tensor]:
        """Outputs, final states, and the gradients of every input, by name.

        The gradients are those of the sum over all outputs and final states, with fixed random weights.
        """
        x_BTC, state = leaf(x_BTC), pytree.tree_map(leaf, state)
        y, final_state = call(x_BTC, state)
        outputs = {"outputs": y} | named("final state", final_state)
        inputs = {TOKENS: x_BTC} | named("initial state", state) | self.parameters
        self.mixer.zero_grad()
        roots = {name: x for name, x in outputs.items() if x.requires_grad}
        # Not torch.autograd.grad, which reentrant activation checkpointing does not support.
        torch.autograd.backward(list(roots.values()), [cotangent(name, x) for name, x in roots.items()])
        for name, x in inputs.items():
            if x.is_floating_point():
                outputs[f"gradient of {name}"] = torch.zeros_like(x) if x.grad is None else x.grad
        self.mixer.zero_grad()
        return {name: x.detach() for name, x in outputs.items()}

    def differences(
        self, found: dict[str, Tensor], expected: dict[str, Tensor], what: str
    ) -> Iterator[tuple[float, str]]:
        """The relative difference of each result, and its name.

        It is relative to the norm of what is expected, but no result is more accurate than a hundred roundings of the
        largest one.
        """
        if found.keys() != expected.keys():
            yield inf, f"{what}: the results {sorted(found.keys() ^ expected.keys())} are on one side only"
            return
        roundings = 100 * torch.finfo(torch.float64).eps / BOUND
        for kind in (True, False):
            names = [name for name in expected if name.startswith("gradient of") == kind]
            floor = roundings * max((expected[name].double().norm().item() for name in names), default=0)
            for name in names:
                yield relative_difference(found[name], expected[name], floor), f"{name}, {what}"


def relative_difference(found: Tensor, expected: Tensor, floor: float = 0) -> float:
    """‖found − expected‖ / max(‖expected‖, floor); infinite for other shapes and for results that are not finite."""
    if found.shape != expected.shape:
        return inf
    found, expected = found.double(), expected.double()
    difference = (found - expected).norm().item()
    return difference / max(expected.norm().item(), floor, 1e-300) if difference < inf else inf


def leaf(x: Any) -> Any:
    """A tensor as a leaf that receives a gradient."""
    return x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x


def named(name: str, state: State | None) -> dict[str, Tensor]:
    """The tensors of a state, by name and path."""
    return {
        name + pytree.keystr(path): x for path, x in pytree.tree_flatten_with_path(state)[0] if isinstance(x, Tensor)
    }


def rows(state: State, start: int, end: int) -> State:
    return pytree.tree_map(lambda x_N: x_N[start:end], state)


def cotangent(name: str, x: Tensor) -> Tensor:
    """Random numbers in the shape of x, equal in all calls with the same name and shape."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def concatenate(states: Sequence[State]) -> State:
    """The state of all documents of several; keys and values [N, H, S, D] of fewer tokens get zeros on the left."""

    def joined(*tensors: Tensor) -> Tensor:
        if tensors[0].dim() < 4:
            return torch.cat(tensors)
        S = max(x.shape[2] for x in tensors)
        return torch.cat([pad(x, (0, 0, S - x.shape[2], 0)) for x in tensors])

    return pytree.tree_map(joined, *states)
