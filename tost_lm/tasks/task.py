"""The interface of a task, and the evaluation of a checkpoint by several tasks.

A task is one way to measure a model. The file of its family holds it whole: settings, examples, how one is scored,
totals, its lines in tables, its section of the report. A changed task gets a new name.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tost_lm.checkpointing.format import SETTINGS
from tost_lm.config import Section, validate
from tost_lm.data.tokenizers import LosslessTokenizer, Tokenizer
from tost_lm.errors import TostError
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.inference.ranks import Ranks

if TYPE_CHECKING:
    from tost_lm.data.shards import Shards
    from tost_lm.inference.generation import LanguageModel, ModelFacts
    from tost_lm.page import Page
    from tost_lm.tasks.evaluated_model import EvaluatedModel

Row = dict[str, Any]
"""A result, or a line of JSON."""


@dataclass(frozen=True)
class Inputs:
    """The settings and texts that tasks read, those of a checkpoint or of a run in training."""

    config: Any
    """The settings, with a section for each family that has any."""
    tokenizer: Tokenizer
    """For texts that are not scored."""
    open_shards: "Callable[[], Shards]"
    """Opens the held-out documents. Raises TostError if there are none."""
    has_shards: bool
    model: str
    """Names the tokenizer in errors."""
    sets: str = "sets"
    """Names the setting with the files of test sets in errors."""
    texts: dict[Any, Any] = field(default_factory=dict)
    """Texts that several tasks read."""
    notes: dict[str, None] = field(default_factory=dict)
    """Lines to print at the end, each once."""

    @property
    def lossless_tokenizer(self) -> Tokenizer:
        """For texts that are scored."""
        return LosslessTokenizer(self.tokenizer, self.model)


class Place(NamedTuple):
    """Where the results of a task are stored, and files from which its measurement resumes."""

    folder: Path
    identity: Row
    """Everything that the results depend on."""


Measure = Callable[["LanguageModel", Ranks, Place | None], Row]
"""Returns the results. All ranks call it together, and what rank 0 returns is stored. Without a place, during training,
no file is written and nothing is printed."""


class Measurement(NamedTuple):
    """A measurement that a task has prepared. Its files have been found and checked."""

    identity: Row
    """Everything that the results depend on beside the checkpoint and the shards."""
    prepare: "Callable[[ModelFacts], Measure]"
    """Raises TostError if the model cannot read what the task would give it, or a file has another format."""
    shards: "Shards | None" = None
    """Those that it reads."""


class Task:
    """One way to measure a model.

    Attributes:
        name: `TEXTS@RULES`, the folder of its results.
        about: what it measures, on one line.
        pattern: how names of its kind look, if a number in the name is a setting.
        headline: the total that is cited.
        column: name and format of a column in the comparison of runs; None: it has none.
        reads_one_stream: its ranks are sequence ranks by default, because it reads one text from end to end.
        shares_copies: whether copies of the model call it equally often, and so share the work also in training.
    """

    name: str
    about: str
    pattern: str = ""
    headline: str
    column: tuple[str, str] | None = None
    reads_one_stream: bool = False
    shares_copies: bool = False

    def named(self, name: str) -> "Task | None":
        """This task if it has the name, or one of its kind."""
        return self if name == self.name else None

    def open(self, inputs: Inputs, family: "Family") -> Measurement:
        """Find and check all that the task reads.

        Raises:
            TostError: a file is missing or damaged, or settings do not fit.
        """
        raise NotImplementedError

    def totals_of(self, results: Row) -> Row:
        """The totals that are logged during training, the headline among them."""
        return results["model"]

    def cited(self, results: Row) -> float:
        """The value of the headline, for comparisons of runs."""
        return results["model"][self.headline]


@dataclass(frozen=True)
class Family:
    """The tasks of one file. Its name stands for all of them, and is that of the section of its settings."""

    name: str
    tasks: Sequence[Task]
    settings: type[Section] | None = None
    section: "Callable[[EvaluatedModel, Page], str] | None" = None
    """The section of the report on a run or model, with its figures; families may share one. Empty: no results."""
    sha256: str = ""
    """Hash of the file of a user that has registered it."""

    def open(self, task: Task, inputs: Inputs) -> Measurement:
        """`task.open` of one of its tasks."""
        return task.open(inputs, self)

    def settings_in(self, config: Any) -> Any:
        """Its settings in those of an evaluation; those of a user's family are `own.NAME`."""
        if hasattr(config, self.name):
            return getattr(config, self.name)
        assert self.settings is not None
        return validate(self.settings, config.own.get(self.name, {}), f"own.{self.name}")

    @property
    def identity(self) -> Row:
        """The values that results depend on beside checkpoint, text and settings."""
        return {"task_sha256": self.sha256} if self.sha256 else {}


def evaluate(
    evaluated: EvaluatedCheckpoint, ranks: Ranks, config: Any, tasks: Sequence[tuple[Family, Task]]
) -> dict[str, TostError]:
    """Measure the tasks that have no results for this checkpoint, and write their results.

    All ranks call it. Every task is checked before the first one is measured. On one rank, a task that fails does not
    stop the others.

    Args:
        config: the settings, with a section for each family that has any.

    Returns:
        The failures by task.

    Raises:
        TostError: files of tasks are missing or damaged, a line for each; on several ranks, also the first failure.
    """
    shards, failures = config.heldout.shards, dict[str, TostError]()
    has_shards = bool(shards) or (evaluated.home / SETTINGS).is_file()
    inputs = Inputs(
        config, evaluated.tokenizer(), partial(evaluated.open_shards, shards), has_shards, str(evaluated.checkpoint)
    )
    wanted = []
    for (family, task), own in zip(tasks, _opened(inputs, tasks), strict=True):
        identity = evaluated.identity(None, own.shards) | own.identity | family.identity
        if not ranks.reusable(evaluated, task.name, identity):
            wanted.append((task, own, Place(evaluated.results_path(task.name).parent, identity)))
    if not wanted:
        return {}
    model, prepared = ranks.load(evaluated), []
    for task, own, place in wanted:
        with _kept(failures, task, ranks):
            prepared.append((task, own.prepare(model.config), place))
    for task, measure, place in prepared:
        started = time.monotonic()
        with _kept(failures, task, ranks):
            results = measure(model, ranks, place)
            if ranks.rank == 0:
                evaluated.write_results(task.name, place.identity, started, results)
    for note in inputs.notes:
        print(note)
    return failures


@contextmanager
def _kept(failures: dict[str, TostError], task: Task, ranks: Ranks) -> Iterator[None]:
    """On one rank, add a failure of the task to `failures`."""
    try:
        yield
    except TostError as error:
        if ranks.mesh:
            raise
        failures[task.name] = error


def _opened(inputs: Inputs, tasks: Sequence[tuple[Family, Task]]) -> list[Measurement]:
    """The measurements of all tasks. Raises TostError with the lines of all that fail."""
    results, problems = [], list[str]()
    for family, task in tasks:
        try:
            results.append(family.open(task, inputs))
        except TostError as error:
            problems += str(error).splitlines()
    if problems:
        raise TostError("\n".join(dict.fromkeys(problems)))
    return results
