"""The ranks of an evaluation. Tensor × sequence ranks hold one copy of the model, and the copies share the work."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tost_lm.config import leaves
from tost_lm.errors import ConfigError, install_hint
from tost_lm.inference.evaluated import EvaluatedCheckpoint, pick_device
from tost_lm.inference.settings import RanksConfig

if TYPE_CHECKING:
    from tost_lm.inference.generation import LanguageModel
    from tost_lm.parallel.mesh import Mesh

PROGRESS_EVERY_S = 60.0
Item = TypeVar("Item")


@contextmanager
def joined_ranks(parallel: RanksConfig, *, copies: bool = False) -> Iterator["Ranks"]:
    """The ranks of this launch, one without a launcher. Inside the block, only rank 0 prints.

    Args:
        copies: the program divides its work among several copies of the model.

    Raises:
        ConfigError: tensor × sequence does not fit the number of ranks, or megatron-core is not installed.
        LostRankError: as `watch_ranks`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    check_layout(parallel, size, copies)
    if size == 1:
        yield Ranks()
        return
    from tost_lm.parallel.mesh import build_mesh, start_world, stop_world
    from tost_lm.parallel.settings import ParallelConfig
    from tost_lm.parallel.watchdog import watch_ranks

    world = start_world(pick_device())
    with (
        Path(os.devnull).open("w") as devnull,
        watch_ranks(),
        redirect_stdout(devnull if world.rank else sys.stdout),
    ):
        yield Ranks(world.rank, build_mesh(world, ParallelConfig(tensor=parallel.tensor, sequence=parallel.sequence)))
        stop_world()


@dataclass(frozen=True)
class Ranks:
    """This rank among those of a launch."""

    rank: int = 0
    mesh: "Mesh | None" = None
    """None: there is only one rank."""
    beat: Callable[[], None] = lambda: None
    """Called before each model call, by all ranks; it may raise an exception that ends the evaluation."""

    @property
    def tensor_ranks(self) -> int:
        """Number of ranks that the heads are spread over."""
        return self.mesh.tensor.size if self.mesh else 1

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that the tokens are spread over."""
        return self.mesh.sequence.size if self.mesh else 1

    @property
    def copy(self) -> int:
        """Index of the copy of the model that this rank belongs to."""
        return self.mesh.data.rank if self.mesh else 0

    @property
    def copies(self) -> int:
        """Number of copies of the model."""
        return self.mesh.data.size if self.mesh else 1

    def each(self, items: Iterable[Item], progress: Callable[[int], str] | None = None) -> Iterator[Item]:
        """The items, with a `beat` before each, and each minute a line of progress for the number of items done."""
        printed_at = time.monotonic()
        for done, item in enumerate(items, start=1):
            self.beat()
            yield item
            if progress and time.monotonic() - printed_at > PROGRESS_EVERY_S:
                print(progress(done), flush=True)
                printed_at = time.monotonic()

    def gather(self, value: Any) -> list[Any]:
        """Each rank's `value` after a round trip through JSON, in rank order; all ranks call it."""
        if self.mesh is None:
            return [value]
        from tost_lm.parallel.agreement import all_gather_object

        return all_gather_object(value)

    def load(self, evaluated: EvaluatedCheckpoint) -> "LanguageModel":
        """The checkpoint's model in evaluation mode; all ranks call it.

        Raises:
            CheckpointError: the model cannot be loaded.
            ConfigError: the heads or the vocabulary cannot be divided evenly.
        """
        model = evaluated.load(str(self.mesh.device) if self.mesh else pick_device(), self.mesh)
        model.name = str(evaluated.checkpoint)
        return model

    def reusable(self, evaluated: EvaluatedCheckpoint, task: str, identity: dict[str, Any]) -> dict[str, Any] | None:
        """The results that rank 0 finds, as in `EvaluatedCheckpoint.reusable`; all ranks call it before any writes.

        Raises:
            ConfigError: the ranks have different checkpoints, texts or settings.
        """
        results = evaluated.reusable(task, identity)
        if self.mesh is None:
            return results
        from tost_lm.parallel.agreement import require_agreement

        facts = {name: json.dumps(value) for name, value in leaves(identity)}
        require_agreement(facts, "give all ranks the same settings, and a step folder that is the same on every node")
        return self.gather(results)[0]


def check_layout(parallel: RanksConfig, size: int, copies: bool) -> None:
    needed = parallel.model_ranks
    if size % needed if copies else size != needed:
        raise ConfigError(
            f"parallel.tensor {parallel.tensor} × parallel.sequence {parallel.sequence} = {needed} does not fit the "
            f"{size} {'rank' if size == 1 else 'ranks'} of this launch; set them so that their product "
            f"{'divides' if copies else 'is'} {size}, or set launch.ranks to {needed}"
        )
    if parallel.tensor > 1 and not find_spec("megatron"):
        raise ConfigError(
            f"parallel.tensor {parallel.tensor} needs megatron-core; {install_hint('megatron')}, or set it to 1"
        )
