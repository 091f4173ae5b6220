"""A copy of the run's state in host memory, from which checkpoints are written. Each rank copies and writes a shard."""

from collections.abc import Mapping
from typing import Any

import torch

from tost_lm.model.config import ModelConfig
from tost_lm.model.lm import parameter_shapes
from tost_lm.parallel import zero


class Snapshot:
    """The whole float32 weights and optimizer state, by name, that this rank writes.

    Its memory, about the size of all state divided by the number of ranks, is allocated once and reused.
    """

    def __init__(self, engine: Any, config: ModelConfig, rank: int, ranks: int) -> None:
        shapes = parameter_shapes(config)
        self._engine = engine
        self.weight_bytes = 4 * sum(shape.numel() for shape in shapes.values())
        """Of the weights of all ranks."""
        statistics = zero.statistics(engine)
        self.total_bytes = sum(4 * shape.numel() * (1 + len(statistics[name])) for name, shape in shapes.items())
        """Of the weights and optimizer state of all ranks."""
        self.names_by_writer = assign_writers({name: shape.numel() for name, shape in shapes.items()}, ranks)
        """Parameter names for each writing rank, fewer than all ranks if there are fewer parameters."""
        names = self.names_by_writer[rank] if rank < len(self.names_by_writer) else []
        # The state is zero before the first update. Copies into pinned memory are several times as fast.
        pinned = engine.mesh.device.type == "cuda"
        self.weights = {name: torch.zeros(shapes[name], pin_memory=pinned) for name in names}
        self.statistics = {
            f"{statistic}/{name}": torch.zeros(shapes[name], pin_memory=pinned)
            for name in names
            for statistic in statistics[name]
        }
        self.rng = torch.get_rng_state()
        """Of torch's CPU generator. All ranks seed it alike, so one state restores any number of ranks."""

    def copy(self) -> None:
        """Copy the current state; all ranks call it."""
        self.rng = torch.get_rng_state()
        for gathered in (
            zero.full_weights(self._engine, self.weights),
            zero.full_moments(self._engine, self.statistics),
        ):
            for _ in gathered:  # tensor by tensor, so that no rank ever holds all of them
                pass


def assign_writers(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Distribute names over ranks so that the sums of their sizes are nearly equal; equal on all ranks, none empty."""
    names_by_writer: list[list[str]] = [[] for _ in range(min(ranks, len(sizes)))]
    loads = [0] * len(names_by_writer)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        names_by_writer[least].append(name)
        loads[least] += sizes[name]
    return names_by_writer
