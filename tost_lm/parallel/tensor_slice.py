"""The slice of a parameter that a tensor rank holds."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from tost_lm.parallel.collectives import all_gather
from tost_lm.parallel.mesh import Axis


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
