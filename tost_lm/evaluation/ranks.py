"""The ranks of an evaluation: together they hold one model, and the first of them speaks and writes."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tost_lm
from tost_lm.config.section import leaves
from tost_lm.errors import ConfigError
from tost_lm.evaluation.config import RanksConfig
from tost_lm.evaluation.subject import Subject, pick_device

if TYPE_CHECKING:
    from tost_lm.parallel.mesh import Mesh
    from tost_lm.parallel.whole import LanguageModel


@contextmanager
def joined_ranks(parallel: RanksConfig) -> Iterator["Ranks"]:
    """To be put around all that the ranks do together; within it only rank 0 prints. One rank needs no launcher.

    Raises:
        ConfigError: the launch has another number of ranks than tensor × sequence, or megatron-core is not installed.
        LostRankError: as `naming_lost_ranks`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    _check(parallel, size)
    if size == 1:
        yield Ranks()
        return
    from tost_lm.parallel.config import ParallelConfig
    from tost_lm.parallel.failures import naming_lost_ranks
    from tost_lm.parallel.mesh import build_mesh
    from tost_lm.parallel.world import start_world, stop_world

    world = start_world(pick_device())
    with (
        Path(os.devnull).open("w") as nowhere,
        naming_lost_ranks(),
        redirect_stdout(nowhere if world.rank else sys.stdout),
    ):
        mesh = build_mesh(world, ParallelConfig(tensor=parallel.tensor, sequence=parallel.sequence))
        yield Ranks(world.rank, mesh)
        stop_world()


@dataclass(frozen=True)
class Ranks:
    """This rank among those of a launch."""

    rank: int = 0
    mesh: "Mesh | None" = None
    """None: there is no other."""

    @property
    def tensor_ranks(self) -> int:
        """Over how many ranks the heads of the model are spread."""
        return self.mesh.tensor.size if self.mesh else 1

    def load(self, checkpoint: Path) -> "LanguageModel":
        """The model of a checkpoint, in evaluation mode; all ranks call it.

        Raises:
            CheckpointError: as `tost_lm.load`.
            ConfigError: heads or vocabulary cannot be shared out evenly.
        """
        if self.mesh is None:
            return tost_lm.load(checkpoint, pick_device())
        from tost_lm.parallel.whole import load_on_ranks

        return load_on_ranks(checkpoint, self.mesh)

    def reusable(self, subject: Subject, protocol: str, identity: dict[str, Any]) -> dict[str, Any] | None:
        """The results that rank 0 finds, as `Subject.reusable` does; all ranks call it before any of them writes.

        Raises:
            ConfigError: the ranks have other checkpoints, texts or settings.
        """
        results = subject.reusable(protocol, identity)
        if self.mesh is None:
            return results
        from tost_lm.parallel.agreement import gather, require_agreement

        facts = {name: json.dumps(value) for name, value in leaves(identity)}
        require_agreement(facts, "give all ranks the same settings, and a step folder that is the same on every node")
        return gather(results)[0]


def _check(parallel: RanksConfig, size: int) -> None:
    needed = parallel.tensor * parallel.sequence
    if needed != size:
        launch = "start it without a launcher" if needed == 1 else f"launch it with torchrun --nproc-per-node {needed}"
        raise ConfigError(
            f"parallel.tensor {parallel.tensor} × parallel.sequence {parallel.sequence} = {needed}, and this launch "
            f"has {size} {'rank' if size == 1 else 'ranks'}: give two numbers whose product is {size}, or {launch}"
        )
    if size > 1 and not find_spec("megatron"):
        raise ConfigError("an evaluation on several ranks needs megatron-core: pip install 'tost-lm[train]'")
