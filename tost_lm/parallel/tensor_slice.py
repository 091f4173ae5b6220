"""The slice of a parameter that a tensor rank holds."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tost_lm.parallel.collectives import all_gather
from tost_lm.parallel.mesh import Axis


@dataclass(frozen=True)
class TensorSlice:
    """Dimension `dim` concatenates `groups` equal groups (q, k and v, say); each group is split evenly over ranks."""

    dim: int
    groups: int = 1

    def local(self, whole: Tensor, axis: Axis) -> Tensor:
        """This rank's slice."""
        slices = whole.unflatten(self.dim, (self.groups, -1)).chunk(axis.size, self.dim + 1)
        return slices[axis.rank].flatten(self.dim, self.dim + 1).contiguous()

    def gather(self, local: Tensor, axis: Axis) -> Tensor:
        """The whole tensor on every rank; a collective call."""
        slices = all_gather(local, axis)().unflatten(self.dim + 1, (self.groups, -1))
        return torch.cat(list(slices), self.dim + 1).flatten(self.dim, self.dim + 1)


def mark_slice(parameter: nn.Parameter, tensor_slice: TensorSlice) -> None:
    parameter.tensor_slice = tensor_slice  # pyright: ignore[reportAttributeAccessIssue]


def slice_of(parameter: nn.Parameter) -> TensorSlice | None:
    """How a parameter is split over tensor ranks; None: it is replicated."""
    return getattr(parameter, "tensor_slice", None)
