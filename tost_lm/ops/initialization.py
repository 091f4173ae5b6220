"""Initial values of parameters: constants, and normal draws of any slice of a parameter without the rest.

Each parameter has a counter-based stream of random words of its own (Philox), whose key is a hash of the seed and the
parameter's name. Element i of the whole parameter, row by row, is made of word i. So one seed gives the same bits under
every parallel layout.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from numpy.random import Philox
from torch import Tensor, nn

BLOCK = 1 << 14
"""Elements drawn at once: so few that torch computes them in one thread."""
COUNTER_WORDS = 4
"""64-bit words that Philox draws for each value of its counter."""


class Normal(NamedTuple):
    """Independent draws of N(0, std²)."""

    std: float


InitialValue = float | Tensor | Normal
"""A number for all elements, a number for each, or a distribution."""


@runtime_checkable
class HasInitialValues(Protocol):
    """A module with parameters of its own."""

    def initial_values(self) -> dict[str, InitialValue]:
        """By the name of the parameter in the module."""
        ...


def initial_values(model: nn.Module, layers: int, std: float) -> dict[str, InitialValue]:
    """The initial value of each parameter of a model of so many layers, by name; it may be on the meta device.

    `std` is the standard deviation of its matrices but those that end a branch: the output projections of mixers and
    MLPs.
    """
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, HasInitialValues):
            values = module.initial_values()
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            values = {"weight": 1.0, "bias": 0.0}
        else:
            ends_branch = prefix.endswith(".out_proj")
            values = {"weight": Normal(std / math.sqrt(2 * layers) if ends_branch else std), "bias": 0.0}
        found |= {f"{prefix}.{name}".lstrip("."): value for name, value in values.items()}
    return {name: found[name] for name, _ in model.named_parameters()}


@torch.no_grad()
def set_own_constants(module: HasInitialValues) -> None:
    """Set the parameters of a new module that are not drawn."""
    for name, value in module.initial_values().items():
        if not isinstance(value, Normal) and (parameter := getattr(module, name)) is not None:
            parameter.copy_(torch.as_tensor(value))


@torch.no_grad()
def initialize(model: nn.Module, layers: int, std: float, seed: int) -> None:
    """Set all parameters of a model to their `initial_values`."""
    for name, value in initial_values(model, layers, std).items():
        parameter = model.get_parameter(name)
        drawn = draw(value, seed, name, parameter.shape) if isinstance(value, Normal) else torch.as_tensor(value)
        parameter.copy_(drawn)


def draw_seed() -> int:
    """A seed from torch's CPU generator."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def draw(
    normal: Normal, seed: int, name: str, shape: Sequence[int], dim: int = 0, ranges: Sequence[range] | None = None
) -> Tensor:
    """Draws of the parameter `name`, a matrix of `shape`, in float32 on the CPU.

    Args:
        ranges: the rows (`dim` 0) or columns (`dim` 1) to draw, one range after the other; None: all.
    """
    rows, columns = shape
    ranges = [range(shape[dim])] if ranges is None else ranges
    stream = _Stream(normal.std, seed, name, rows * columns)
    sizes = [len(wanted) for wanted in ranges]
    if dim == 0:
        drawn = torch.empty(sum(sizes), columns, device="cpu", dtype=torch.float32)
        for wanted, part in zip(ranges, drawn.split(sizes), strict=True):
            stream.fill(part, wanted.start * columns)
        return drawn
    drawn = torch.empty(rows, sum(sizes), device="cpu", dtype=torch.float32)
    some = max(1, 8 * BLOCK // columns)
    for row in range(0, rows, some):
        whole = torch.empty(min(some, rows - row), columns, device="cpu", dtype=torch.float32)
        stream.fill(whole, row * columns)
        drawn[row : row + some] = torch.cat([whole[:, wanted.start : wanted.stop] for wanted in ranges], 1)
    return drawn


class _Stream:
    """The draws of one parameter of so many elements."""

    def __init__(self, std: float, seed: int, name: str, elements: int):
        self._scale = std * math.sqrt(2)
        self._key = xxhash.xxh3_128_intdigest(f"{seed}/{name}".encode())
        self._block_elements = min(BLOCK, elements)

    def fill(self, target: Tensor, first: int) -> None:
        """Set `target`, contiguous, to elements `first`, `first` + 1, …"""
        size, flat_N = self._block_elements, target.view(-1)
        for block in range(first // size, -(-(first + len(flat_N)) // size)):
            # Always whole blocks: at another place of a vector, torch's erfinv may round differently.
            start, stop = max(first, block * size), min(first + len(flat_N), (block + 1) * size)
            flat_N[start - first : stop - first] = self._block(block)[start - block * size : stop - block * size]

    def _block(self, number: int) -> Tensor:
        philox = Philox(key=self._key, counter=number * (BLOCK // COUNTER_WORDS))
        words = philox.random_raw(self._block_elements).view(np.int64)
        # The upper 53 bits as numbers between −1 and 1: (n + ½) / 2⁵² is exact and never −1 or 1.
        uniform_N = torch.from_numpy(words).bitwise_right_shift_(11).double()
        return uniform_N.add_(0.5).mul_(2.0**-52).erfinv_().mul_(self._scale)
