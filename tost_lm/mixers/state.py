"""The states of token mixers between calls: what a model does with any of them.

A state is a NamedTuple of tensors, [N, …], and of such states. One that grows with the text may be a `SharedState`
between tiles of training instead: each tile stores only what it adds, and later tiles read the same memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from tost_lm.ops.precision import statistics_dtype


@dataclass
class TileTensor:
    """What a tile adds to a state."""

    x: Tensor
    """On the device or in host memory."""
    gradient: Tensor | None = None
    """The sum over later tiles so far, in the statistics dtype and beside `x`; None: not wanted."""

    def read(self, device: torch.device) -> Tensor:
        """`x` on the device; a backward through it adds to `gradient`."""
        leaf = self.x.detach().to(device)
        if self.gradient is not None:
            leaf.requires_grad_().register_post_accumulate_grad_hook(self._add)
        return leaf

    def _add(self, leaf: Tensor) -> None:
        assert self.gradient is not None
        assert leaf.grad is not None
        self.gradient += leaf.grad.to(self.gradient)
        leaf.grad = None


class SharedState:
    """The state after some tiles, which the states of later tiles share."""

    def __init__(self, tiles: Sequence[TileTensor]):
        self.tiles = tuple(tiles)

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Change what the last tile added, for all states that share it."""
        self.tiles[-1].x = change(self.tiles[-1].x)
        return self

    def as_leaves(self, device: torch.device) -> Self:
        """Begin sums of the gradients that later tiles add to, beside the tensors."""
        for tile in self.tiles:
            if tile.gradient is None:
                tile.gradient = torch.zeros_like(tile.x, dtype=statistics_dtype(tile.x))
        return self

    @property
    def leaves(self) -> list[Tensor]:
        """What the last tile added."""
        return [self.tiles[-1].x]

    @property
    def gradients(self) -> list[Tensor | None]:
        last = self.tiles[-1]
        return [None if last.gradient is None else last.gradient.to(last.x.dtype)]


def parts(state: Any) -> list[Any]:
    """The tensors and shared states of a state."""
    return [state] if isinstance(state, Tensor | SharedState) else [x for part in state for x in parts(part)]


def mapped(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The state with each of its tensors changed."""
    if isinstance(state, Tensor | SharedState):
        return change(state) if isinstance(state, Tensor) else state.map(change)
    return type(state)(*(mapped(part, change) for part in state))


def as_leaves(state: Any, device: torch.device) -> Any:
    """The state on a device, whose tensors receive gradients."""
    if isinstance(state, Tensor):
        return state.to(device).detach().requires_grad_(state.is_floating_point())
    if isinstance(state, SharedState):
        return state.as_leaves(device)
    return type(state)(*(as_leaves(part, device) for part in state))


def leaves(state: Any) -> list[Tensor]:
    """The tensors of a state that have gradients."""
    of_parts = (part.leaves if isinstance(part, SharedState) else [part] for part in parts(state))
    return [x for found in of_parts for x in found if x.is_floating_point()]


def gradients(state: Any) -> list[Tensor | None]:
    """Those of `leaves`, of a state that `as_leaves` returned."""
    found: list[Tensor | None] = []
    for part in parts(state):
        found += part.gradients if isinstance(part, SharedState) else [part.grad] * part.is_floating_point()
    return found
