"""Tasks during training: the same scores, of the model in memory."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tost_lm.config import validate
from tost_lm.data.shards import Shards
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.files import sha256_bytes
from tost_lm.inference.ranks import Ranks
from tost_lm.parallel.apply import ShardedInference
from tost_lm.tasks.settings import EvalConfig, tasks_of
from tost_lm.tasks.task import Inputs, Measure, Measurement, Row, Task

if TYPE_CHECKING:
    from tost_lm.inference.generation import ModelFacts
    from tost_lm.parallel.engine import Engine


class AllCopies(Ranks):
    """Each copy of the model does the whole work: at ZeRO stage 3, all ranks must call the model equally often."""

    @property
    def copy(self) -> int:
        return 0

    @property
    def copies(self) -> int:
        return 1


@dataclass(frozen=True)
class TaskInTraining:
    """A task with what it reads."""

    task: Task
    data_sha256: str
    """Identifies what it reads."""
    measure: Measure


@dataclass(frozen=True)
class TasksInTraining:
    """Tasks with what they read."""

    tasks: Sequence[TaskInTraining]

    @classmethod
    def find(
        cls,
        names: Sequence[str],
        sets: Mapping[str, Path],
        settings: Mapping[str, Mapping[str, Any]],
        tokenizer: Tokenizer,
        shards: Shards,
        model: "ModelFacts",
    ) -> "TasksInTraining":
        """The tasks of the recipe's section `evaluation`.

        Args:
            names: of tasks, families or groups.
            sets: files of test sets; others are downloaded.
            settings: further sections of `tost eval`.
            shards: the held-out text.

        Raises:
            ConfigError: a task, setting or test set does not exist, a file is not given and cannot be downloaded, or
                the model cannot read what a task would give it.
            DataError: a file is missing or does not have the task's format, or the tokenizer loses text of it.
        """
        tree = {"tasks": names, "sets": {name: str(path) for name, path in sets.items()}, **settings}
        config = validate(EvalConfig, tree, "evaluation", from_user=True)
        inputs = Inputs(config, tokenizer, lambda: shards, True, str(shards.folder), "evaluation.sets")
        return cls([_found(task, family.open(task, inputs), model) for family, task in tasks_of(config)])

    @property
    def facts(self) -> dict[str, str]:
        """Facts that all ranks must agree on."""
        return {f"data of {own.task.name}": own.data_sha256 for own in self.tasks}

    def measure(self, engine: "Engine", beat: Callable[[], None]) -> list[Row]:
        """The totals of each task, those of its results.json for a test set, and the name of its headline.

        All ranks call it and get the same results.

        Args:
            engine: of the model in training, at any ZeRO stage.
            beat: called before each task and each batch, equally often by all ranks.
        """
        model, rows = ShardedInference(engine.module, engine.mesh, engine), []
        engine.set_training(False)
        for own in self.tasks:
            beat()
            kind = Ranks if own.task.shares_copies else AllCopies
            with redirect_stdout(io.StringIO()):
                results = own.measure(model, kind(engine.mesh.rank, engine.mesh, beat), None)
            names = {"protocol": own.task.name, "headline": own.task.headline, "data_sha256": own.data_sha256}
            rows.append(names | own.task.totals_of(results))
        engine.set_training(True)
        return rows


def _found(task: Task, measurement: Measurement, model: "ModelFacts") -> TaskInTraining:
    shards = measurement.shards and measurement.shards.fingerprint
    whole = json.dumps([shards, measurement.identity]).encode()
    sha256 = measurement.identity.get("data_sha256") or sha256_bytes(whole)
    return TaskInTraining(task, sha256, measurement.prepare(model))
