"""A copy of the run's state in host memory, shared out over the ranks: each writes its own part."""

from collections.abc import Mapping
from typing import Any

import torch

from tost_lm.model.config import ModelConfig
from tost_lm.model.lm import TostLM
from tost_lm.parallel import zero

STATISTICS = ("exp_avg", "exp_avg_sq")  # of AdamW, float32 as the weights


class Snapshot:
    """Whole float32 weights and statistics by name, those of which this rank is the writer.

    The memory, about the whole divided by the number of ranks, is kept from one copy to the next.
    """

    def __init__(self, engine: Any, config: ModelConfig, rank: int, ranks: int) -> None:
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in TostLM(config).named_parameters()}
        self._engine = engine
        self.weight_bytes = 4 * sum(shape.numel() for shape in shapes.values())
        """Of all ranks' weights."""
        self.total_bytes = self.weight_bytes * (1 + len(STATISTICS))
        """Of all ranks' weights and statistics."""
        self.shares = share_out({name: shape.numel() for name, shape in shapes.items()}, ranks)
        """The names of the parameters of each writing rank; there may be more ranks than parameters."""
        mine = self.shares[rank] if rank < len(self.shares) else []
        # Zeros are what the statistics are before the first update; pinned memory is copied to several times as fast.
        pinned = engine.mesh.device.type == "cuda"
        self.weights = {name: torch.zeros(shapes[name], pin_memory=pinned) for name in mine}
        self.statistics = {
            f"{statistic}/{name}": torch.zeros(shapes[name], pin_memory=pinned)
            for name in mine
            for statistic in STATISTICS
        }
        self.rng = torch.get_rng_state()
        """Of torch's CPU generator here. All ranks seed it alike, so that of one stands for any number of them."""

    def take(self) -> None:
        """Copy the state as it is; all ranks call it."""
        self.rng = torch.get_rng_state()
        for gathered in (
            zero.full_weights(self._engine, self.weights),
            zero.full_moments(self._engine, self.statistics),
        ):
            for _ in gathered:  # tensor by tensor, so that no rank ever holds all of them
                pass


def share_out(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Give each rank names of about the same size in all; the same for all who ask. No share is empty."""
    shares: list[list[str]] = [[] for _ in range(min(ranks, len(sizes)))]
    loads = [0] * len(shares)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        shares[least].append(name)
        loads[least] += sizes[name]
    return shares
