"""The boundary between training and what divides a model over ranks: `fsdp` and `deepspeed` implement it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tost_lm.model.block import LMOutput
from tost_lm.model.lm import TostLM
from tost_lm.optim.interface import statistics_of
from tost_lm.parallel.mesh import Mesh
from tost_lm.parallel.rank_weights import draw_on_rank, slice_of
from tost_lm.sizes import CAST_ELEMENTS, buckets


class StepSettings(NamedTuple):
    """How an engine computes a step."""

    accumulation: int = 1
    """Micro-batches of a rank."""
    grad_clip: float = 0.0
    """Largest global gradient norm; 0: gradients are not clipped."""
    bfloat16: bool = False
    """Data type of weights and activations; otherwise float32."""


class Engine(ABC):
    """A model that is divided over ranks, and its optimizer. All ranks call its methods together.

    The average of gradients is over micro-batches and over data × sequence ranks. So a rank's loss must be the sum over
    its labelled tokens · micro-batches · ranks / labelled tokens of the global batch. In bfloat16, gradients are summed
    and sent as float32.
    """

    mesh: Mesh
    module: TostLM
    """The model. Its parameters may be partitions, and other tensors in a call: see `parameters`."""
    parameters: Mapping[str, nn.Parameter]
    """By name: this rank's memory of each parameter, marked with its `slice_of`."""
    optimizer: torch.optim.Optimizer
    """torch's; what it updates and keeps may be partitions."""

    @property
    @abstractmethod
    def replicated_part(self) -> int | None:
        """The number of this rank's part of weights and optimizer state, of which other ranks have equal copies; None:
        there is no copy."""

    @abstractmethod
    def __call__(self, *arguments: Any, **options: Any) -> LMOutput:
        """Call the model, whose weights are gathered."""

    @abstractmethod
    def set_training(self, training: bool) -> None:
        """Whether the next calls train."""

    @abstractmethod
    def backward(self, roots: Sequence[Tensor], d_states: Sequence[Tensor] = (), *, ends_step: bool = True) -> None:
        """The backward after the call that computed a loss.

        Args:
            roots: the loss, then tensors of a tile's final state.
            d_states: the gradients of these.
            ends_step: no other backward of the step follows.
        """

    @abstractmethod
    def update(self, lr: float, is_allowed: Callable[[float], bool]) -> float:
        """After the last backward: update the weights with a learning rate if `is_allowed(norm)`; otherwise weights and
        optimizer stay as they are.

        Returns:
            The global gradient norm before clipping, equal on every rank; inf if it is not finite. Then the update is
            skipped in any case.
        """

    @abstractmethod
    def whole(self, name: str, statistic: str = "") -> Tensor | None:
        """The float32 weight of a parameter, or what the optimizer keeps of it, gathered over all ranks; None: the
        optimizer keeps nothing before its first update. It may alias the memory that is trained on."""

    def statistics(self) -> dict[str, tuple[str, ...]]:
        """Names of what the optimizer keeps of each parameter."""
        return {name: statistics_of(self.optimizer, parameter) for name, parameter in self.parameters.items()}

    def copy_state(self, into: Mapping[str, Tensor]) -> None:
        """Copy weights and optimizer state to the tensors of this rank, by label as in `set_state`: one at a time, so
        that no rank ever holds all of them. Before the first update, statistics are left as they are."""
        for name, statistics in self.statistics().items():
            for statistic in ("", *statistics):
                whole = self.whole(name, statistic)
                label = f"{statistic}/{name}" if statistic else name
                if whole is not None and label in into:
                    into[label].copy_(whole)

    @abstractmethod
    def updated(self) -> Sequence[tuple[str, Tensor]]:
        """(name, tensor) that the optimizer updates on this rank: float32 weights or partitions."""

    def own_state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of this rank's optimizer memory, not copied: what it updates and, after a step or
        `create_state`, their statistics."""
        for name, tensor in self.updated():
            yield name, tensor.detach()
            for key, value in self.optimizer.state.get(tensor, {}).items():
                if torch.is_tensor(value) and value.dim() > 0:
                    yield f"{key} of {name}", value

    def create_state(self, step: int) -> None:
        """The optimizer state of a new engine after `step` updates, with statistics of zeros."""
        for _, tensor in self.updated():
            # torch creates the state in its first step.
            state = self.optimizer.state[tensor]
            state["step"] = torch.tensor(float(step), device=tensor.device)
            for key in statistics_of(self.optimizer, tensor):
                state.setdefault(key, torch.zeros_like(tensor))

    @abstractmethod
    def set_state(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Set weights and optimizer state, one tensor at a time, under any parallel layout.

        Args:
            tensors: by parameter name the weight, or by statistic/name the optimizer's, after `create_state`: float32,
                the slice of this tensor rank.
        """

    def draw_weights(self) -> None:
        """Draw the weights of a new engine, as `TostLM` does."""
        self.set_state(draw_on_rank(self.parameters, self.module.config, self.mesh.tensor))


def counted_once(pairs: Iterable[tuple[nn.Parameter, Tensor]], mesh: Mesh) -> list[Tensor]:
    """The gradients of this tensor rank; those of parameters that all of them have, on the first one."""
    return [gradient for parameter, gradient in pairs if mesh.tensor.rank == 0 or slice_of(parameter) is not None]


def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """In float64: a CPU adds up float32 squares with relative errors of up to 1e-4. torch casts them first."""
    pieces = chain.from_iterable(gradient.flatten().split(CAST_ELEMENTS) for gradient in gradients)
    flat = (torch.cat(pieces) for pieces in buckets(pieces, Tensor.numel, CAST_ELEMENTS))  # few launches
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in flat]).square().sum()
