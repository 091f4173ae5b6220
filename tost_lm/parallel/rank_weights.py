"""The weights that a tensor rank holds, without the rest of the model: its slices, their memory and their values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from tost_lm.model.config import ModelConfig
from tost_lm.model.lm import TostLM
from tost_lm.ops.initialization import Normal, draw, draw_seed, initial_values
from tost_lm.parallel.mesh import Axis, all_gather


@dataclass(frozen=True)
class TensorSlice:
    """Dimension `dim` concatenates groups (q, k and v, say); each group is split evenly over ranks."""

    dim: int
    groups: tuple[int, ...] = (1,)
    """Relative sizes of the groups."""

    def local(self, whole: Tensor, axis: Axis) -> Tensor:
        """This rank's slice, a view of `whole` if there is one group."""
        ranges = self.ranges(whole.shape[self.dim], axis)
        parts = [whole.narrow(self.dim, held.start, len(held)) for held in ranges]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0]

    def ranges(self, size: int, axis: Axis) -> list[range]:
        """The indices in dimension `dim`, of length `size` in the whole tensor, that this rank holds."""
        unit, starts = size // sum(self.groups), accumulate(self.groups, initial=0)
        parts = [(start * unit, count * unit // axis.size) for start, count in zip(starts, self.groups, strict=False)]
        return [range(start + axis.rank * length, start + (axis.rank + 1) * length) for start, length in parts]

    def gather(self, local: Tensor, axis: Axis) -> Tensor:
        """The whole tensor on every rank; a collective call."""
        ranks = [self._groups(of_rank) for of_rank in all_gather(local, axis)()]
        return torch.cat([x for group in zip(*ranks, strict=True) for x in group], self.dim)

    def _groups(self, tensor: Tensor) -> tuple[Tensor, ...]:
        unit = tensor.shape[self.dim] // sum(self.groups)
        return tensor.split([size * unit for size in self.groups], self.dim)


def mark_slice(parameter: nn.Parameter, tensor_slice: TensorSlice) -> None:
    parameter.tensor_slice = tensor_slice  # pyright: ignore[reportAttributeAccessIssue]


def slice_of(parameter: nn.Parameter) -> TensorSlice | None:
    """How a parameter is split over tensor ranks; None: it is replicated."""
    return getattr(parameter, "tensor_slice", None)


def allocate(model: nn.Module, device: torch.device, dtype: torch.dtype, *, shared: bool = False) -> None:
    """Replace all parameters, which are on the meta device, by new ones without values.

    Args:
        shared: all have the same memory, that of the largest: for an engine that copies weights into its own.
    """
    parameters = dict(model.named_parameters())
    largest = max(parameter.numel() for parameter in parameters.values())
    memory = torch.empty(largest if shared else 0, dtype=dtype, device=device)
    for name, parameter in parameters.items():
        if shared:
            data = memory[: parameter.numel()].view(parameter.shape)
        else:
            data = torch.empty(parameter.shape, dtype=dtype, device=device)
        allocated = nn.Parameter(data)
        marks = {key: mark for key, mark in vars(parameter).items() if not hasattr(allocated, key)}
        vars(allocated).update(marks)  # of tensor ranks
        replace_parameter(model, name, allocated)


def replace_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, parameter)


def draw_on_rank(
    parameters: Mapping[str, nn.Parameter], config: ModelConfig, axis: Axis
) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of each parameter's slice on this tensor rank, float32 on the CPU, as `TostLM(config)` draws it.

    The seed comes from torch's CPU generator, which all ranks seed alike.
    """
    seed = draw_seed()
    with torch.device("meta"):
        whole = TostLM(config)
    values = initial_values(whole, config.layers, config.init_std)
    for name, parameter in parameters.items():
        value, shape, held = values[name], whole.get_parameter(name).shape, slice_of(parameter)
        if isinstance(value, Normal) and held is not None:
            yield name, draw(value, seed, name, shape, held.dim, held.ranges(shape[held.dim], axis))
        elif isinstance(value, Normal):
            yield name, draw(value, seed, name, shape)
        else:
            yield name, local_slice(torch.as_tensor(value, dtype=torch.float32).expand(shape), parameter, axis)


def local_slice(whole: Tensor, parameter: nn.Parameter, axis: Axis) -> Tensor:
    """This tensor rank's slice of a whole tensor of a parameter."""
    held = slice_of(parameter)
    return whole if held is None else held.local(whole, axis)
