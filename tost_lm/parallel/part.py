"""Which part of a whole parameter a tensor rank holds."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tost_lm.parallel.collectives import all_gather
from tost_lm.parallel.mesh import Axis


@dataclass(frozen=True)
class Part:
    """Dimension `dim` is `groups` blocks, each of them shared out over the ranks."""

    dim: int
    groups: int = 1

    def of(self, whole: Tensor, axis: Axis) -> Tensor:
        """This rank's part."""
        blocks = whole.unflatten(self.dim, (self.groups, -1)).chunk(axis.size, self.dim + 1)
        return blocks[axis.rank].flatten(self.dim, self.dim + 1).contiguous()

    def whole(self, part: Tensor, axis: Axis) -> Tensor:
        """The whole on every rank; all of them call it."""
        parts = all_gather(part, axis)().unflatten(self.dim + 1, (self.groups, -1))
        return torch.cat(list(parts), self.dim + 1).flatten(self.dim, self.dim + 1)


def mark(parameter: nn.Parameter, part: Part) -> None:
    """Note down that a parameter is a part."""
    parameter.tensor_part = part  # pyright: ignore[reportAttributeAccessIssue]


def part_of(parameter: nn.Parameter) -> Part | None:
    """How a parameter is split over tensor ranks; None: every rank has all of it."""
    return getattr(parameter, "tensor_part", None)
