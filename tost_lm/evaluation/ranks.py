"""The ranks of an evaluation: tensor × sequence of them hold a model, as many copies as there are share the work, and
the first rank speaks and writes."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tost_lm.config.section import leaves
from tost_lm.errors import ConfigError
from tost_lm.evaluation.config import RanksConfig
from tost_lm.evaluation.subject import Subject, pick_device

if TYPE_CHECKING:
    from tost_lm.evaluation.language_model import LanguageModel
    from tost_lm.parallel.mesh import Mesh


@contextmanager
def joined_ranks(parallel: RanksConfig, *, copies: bool = False) -> Iterator["Ranks"]:
    """To be put around all that the ranks do together; within it only rank 0 prints. One rank needs no launcher.

    Args:
        copies: several copies of the model can share the work.

    Raises:
        ConfigError: tensor × sequence is not the number of ranks of the launch, nor divides it where there can be
            copies, or megatron-core is not installed.
        LostRankError: as `naming_lost_ranks`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    _check(parallel, size, copies)
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
    beat: Callable[[], None] = lambda: None
    """Called for each batch: this rank goes on."""

    @property
    def tensor_ranks(self) -> int:
        """Over how many ranks the heads of the model are spread."""
        return self.mesh.tensor.size if self.mesh else 1

    @property
    def copy(self) -> int:
        """Which copy of the model this rank holds a part of."""
        return self.mesh.data.rank if self.mesh else 0

    @property
    def copies(self) -> int:
        """How many copies there are, which share the work."""
        return self.mesh.data.size if self.mesh else 1

    @property
    def leads(self) -> bool:
        """Whether this rank writes what its copy of the model found out."""
        return self.mesh is None or self.mesh.tensor.rank == self.mesh.sequence.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """What JSON makes of each rank's `value`, in order of rank; all ranks call it."""
        if self.mesh is None:
            return [value]
        from tost_lm.parallel.agreement import gather

        return gather(value)

    def load(self, subject: Subject) -> "LanguageModel":
        """The subject's model, in evaluation mode; all ranks call it.

        Raises:
            CheckpointError: it cannot be loaded.
            ConfigError: heads or vocabulary cannot be shared out evenly.
        """
        return subject.load(pick_device()) if self.mesh is None else subject.load_on_ranks(self.mesh)

    def reusable(self, subject: Subject, protocol: str, identity: dict[str, Any]) -> dict[str, Any] | None:
        """The results that rank 0 finds, as `Subject.reusable` does; all ranks call it before any of them writes.

        Raises:
            ConfigError: the ranks have other checkpoints, texts or settings.
        """
        results = subject.reusable(protocol, identity)
        if self.mesh is None:
            return results
        from tost_lm.parallel.agreement import require_agreement

        facts = {name: json.dumps(value) for name, value in leaves(identity)}
        require_agreement(facts, "give all ranks the same settings, and a step folder that is the same on every node")
        return self.gather(results)[0]


def _check(parallel: RanksConfig, size: int, copies: bool) -> None:
    needed = parallel.tensor * parallel.sequence
    if size % needed if copies else size != needed:
        launch = "start it without a launcher" if needed == 1 else f"launch it with torchrun --nproc-per-node {needed}"
        raise ConfigError(
            f"parallel.tensor {parallel.tensor} × parallel.sequence {parallel.sequence} = {needed}, and this launch "
            f"has {size} {'rank' if size == 1 else 'ranks'}: give two numbers whose product "
            f"{'divides' if copies else 'is'} {size}, or {launch}"
        )
    if size > 1 and not find_spec("megatron"):
        raise ConfigError("an evaluation on several ranks needs megatron-core: pip install 'tost-lm[train]'")
