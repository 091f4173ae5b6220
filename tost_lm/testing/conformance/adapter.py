"""The adapter of a token mixer, and the mixer with drawn weights that the equalities are tested on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tost_lm.mixers.registry import SPECS, mixer_class
from tost_lm.model.config import ModelConfig
from tost_lm.ops.layout import SequenceShard, SequenceSplit
from tost_lm.ops.positions import SequenceInfo
from tost_lm.torch_internals import pytree

State = Any
"""Tensors in tuples, named tuples, lists or dicts; the first axis of each tensor is the documents, [N, …]."""

TOKENS = "tokens"
"""The name of x among the inputs."""
WEIGHT_NOISE = 0.1


class CallMixer(Protocol):
    """How the harness calls a mixer."""

    def __call__(
        self,
        mixer: Any,
        x_BTC: Tensor,
        *,
        state: State | None,
        cu_seqlens: Tensor | None,
        output_state: bool,
        shard: SequenceShard | None,
    ) -> tuple[Tensor, State | None]:
        """Mix the tokens.

        Args:
            mixer: what `MixerAdapter.build` returned.
            x_BTC: the tokens; with `shard`, those of this rank.
            state: the state after earlier tokens. It may have fewer rows than there are documents: the first documents
                continue from it, the others start empty. None: all start empty.
            cu_seqlens: int64 [N + 1] on the host, offsets of the documents packed into one row (B = 1), over all
                ranks. None: each row is a document.
            output_state: whether the final state is needed; otherwise it is ignored.
            shard: what `MixerAdapter.shard` returned; None: all tokens are here.

        Returns:
            The outputs [B, T, …], and the state with a row for each document, or None. On ranks, states are those of
            the whole sequences, equal on all ranks.
        """
        ...


def concatenate_rows(states: Sequence[State]) -> State:
    """The state of all documents of several states: their tensors, concatenated along the first axis."""
    return pytree.tree_map(lambda *tensors: torch.cat(tensors), *states)


@dataclass(frozen=True)
class MixerAdapter:
    """Description of a mixer for the harness. To check sequence ranks, it must be picklable: functions of a module.

    A mixer without states, documents or ranks passes by not offering them, and the report says so.
    """

    name: str
    channels: int
    """C of the tokens."""
    build: Callable[[], nn.Module]
    """The mixer, on its device, without dropout. The harness seeds torch's generator and adds noise to each weight, so
    that weights that start at zero do not hide an error."""
    call: CallMixer
    has_state: bool = True
    has_documents: bool = True
    window: int | None = None
    """A token depends on itself and the window − 1 tokens before it only; None: on all tokens before it."""
    shard: Callable[[SequenceSplit], SequenceShard] | None = None
    """Communication of a sequence rank, called on each rank in its process group; None: no sequence ranks."""
    concatenate_states: Callable[[Sequence[State]], State] = concatenate_rows
    """The state of all documents of several states. Another function is needed where rows are padded."""
    dtype: torch.dtype = torch.float64
    bound: float = 1e-10
    """The largest relative difference that holds. A mixer that computes in float32 needs about 1e-4."""
    contains_nan: bool = True
    """Whether `Report.require` demands that a NaN reaches later tokens of its document only. A masked product within a
    chunk carries it to earlier ones, as 0 · NaN."""


class Subject:
    """A mixer with drawn weights."""

    def __init__(self, adapter: MixerAdapter, seed: int):
        self.adapter, self.seed = adapter, seed
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.mixer = adapter.build().to(adapter.dtype)
            self.parameters = {name: p for name, p in self.mixer.named_parameters() if p.requires_grad}
            with torch.no_grad():
                for parameter in self.parameters.values():
                    parameter += WEIGHT_NOISE * torch.randn(parameter.shape).to(parameter)
        self.device = next((p.device for p in self.mixer.parameters()), torch.device("cpu"))

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device, self.adapter.dtype)

    def tokens(self, B: int, T: int) -> Tensor:
        return self.draw(B, T, self.adapter.channels)

    def states(self, documents: int) -> State:
        """States after 1 to 5 tokens, of different numbers if the mixer offers documents."""
        with torch.no_grad():
            if not self.adapter.has_documents:
                return self(self.tokens(documents, 5))[1]
            states = [self(self.tokens(1, 1 + 3 * n % 5))[1] for n in range(1, documents + 1)]
        return self.adapter.concatenate_states(states)

    def __call__(
        self,
        x_BTC: Tensor,
        state: State | None = None,
        offsets: Sequence[int] | None = None,
        shard: SequenceShard | None = None,
        output_state: bool | None = None,
    ) -> tuple[Tensor, State | None]:
        output_state = self.adapter.has_state if output_state is None else output_state
        cu_seqlens = None if offsets is None else torch.tensor(offsets)
        y, final_state = self.adapter.call(
            self.mixer, x_BTC, state=state, cu_seqlens=cu_seqlens, output_state=output_state, shard=shard
        )
        return y, final_state if output_state else None

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
        roundings = 100 * torch.finfo(self.adapter.dtype).eps / self.adapter.bound
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


def layer_adapter(
    letter: str, config: ModelConfig, shard: Callable[[SequenceSplit], SequenceShard] | None = None, **fields: Any
) -> MixerAdapter:
    """The mixer that `letter` has in `model.pattern`.

    A state is that of the layer with the number of tokens so far, which the layer gets as positions. Of a plugin, the
    rule about NaN is reported and not required.

    Args:
        letter: of a mixer in `tost_lm.mixers.registry.SPECS`.
        config: the shape of the layer.
        shard: as in `MixerAdapter`.
        fields: other fields of the adapter.
    """
    return MixerAdapter(
        name=letter,
        channels=config.width,
        build=partial(mixer_class(letter), config.shape_of(letter)),
        call=partial(_call, config),
        shard=shard,
        concatenate_states=concatenate_aligned,
        **{"window": config.kept_tokens or None, "contains_nan": SPECS[letter].plugin is None, **fields},
    )


def _call(
    config: ModelConfig,
    mixer: nn.Module,
    x_BTC: Tensor,
    *,
    state: State | None,
    cu_seqlens: Tensor | None,
    output_state: bool,
    shard: SequenceShard | None,
) -> tuple[Tensor, State | None]:
    layer_state, positions = (None, None) if state is None else (state[0], state[1].tolist())
    documents = len(x_BTC) if cu_seqlens is None else len(cu_seqlens) - 1
    if positions is not None:
        positions += [0] * (documents - len(positions))
    info = SequenceInfo.of(x_BTC[..., 0], positions, cu_seqlens, shard, output_state)
    y_BTC, layer_state = mixer(x_BTC, layer_state, info.with_rotary(config.rotary, x_BTC.dtype))
    return y_BTC, (layer_state, torch.tensor(info.end_positions)) if output_state else None


def concatenate_aligned(states: Sequence[State]) -> State:
    """Like `concatenate_rows`; keys and values [N, H, S, D] of fewer tokens are padded with zeros on the left."""

    def concatenate(*tensors: Tensor) -> Tensor:
        if tensors[0].dim() < 4:
            return torch.cat(tensors)
        S = max(x.shape[2] for x in tensors)
        return torch.cat([pad(x, (0, 0, S - x.shape[2], 0)) for x in tensors])

    return pytree.tree_map(concatenate, *states)
