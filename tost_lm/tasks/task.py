"""The interface of a task, and the evaluation of a checkpoint by several tasks.

A task is one way to measure a model. The file of its family holds it whole: settings, examples, how one is scored,
totals, its lines in tables, its section of the report. A changed task gets a new name.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tost_lm.config import Section, validate
from tost_lm.errors import ConfigError, TostError
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.inference.ranks import Ranks

if TYPE_CHECKING:
    from tost_lm.data.shards import Shards
    from tost_lm.data.tokenizers import Tokenizer
    from tost_lm.inference.generation import LanguageModel, ModelFacts
    from tost_lm.page import Page
    from tost_lm.tasks.sections import EvaluatedModel

Row = dict[str, Any]
"""A result, or a line of JSON."""


@dataclass(frozen=True)
class Evaluation:
    """The checkpoint, ranks, settings and texts that the tasks of one evaluation share."""

    evaluated: EvaluatedCheckpoint
    ranks: Ranks
    config: Any
    """The settings, with a section for each family that has any."""
    notes: dict[str, None] = field(default_factory=dict)
    """Lines to print at the end, each once."""
    texts: dict[Any, Any] = field(default_factory=dict)
    """Texts that several tasks read."""

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """For texts that are scored."""
        return self.evaluated.lossless_tokenizer()

    @cached_property
    def model(self) -> "LanguageModel":
        """In evaluation mode; all ranks ask for it together."""
        return self.ranks.load(self.evaluated)

    def folder(self, task: str) -> Path:
        """The folder of a task's results."""
        return self.evaluated.results_path(task).parent


class Measurement(NamedTuple):
    """A measurement of a checkpoint that a task has prepared. Its files have been found and checked."""

    identity: Row
    """Everything that the results depend on."""
    measure: Callable[[], Row]
    """Returns the results. All ranks call it together, and what rank 0 returns is stored."""
    check: "Callable[[ModelFacts], object]" = lambda model: None
    """Raises TostError if the model cannot read what the task would give it."""


@dataclass(frozen=True)
class Training:
    """The settings, texts and model that tasks have during training."""

    config: Any
    """The settings, as in `Evaluation`."""
    tokenizer: "Tokenizer"
    shards: "Shards"
    """The held-out text."""
    model: "ModelFacts"
    texts: dict[Any, Any] = field(default_factory=dict)
    """Texts that several tasks read."""


class MeasuredInTraining(NamedTuple):
    """A task during training."""

    data_sha256: str
    """Identifies what it reads."""
    measure: "Callable[[LanguageModel, Ranks], Row]"
    """Returns the totals, the headline among them. All ranks call it together and get the same."""
    shares_copies: bool = False
    """Whether copies of the model share the work and call it equally often."""


class Task:
    """One way to measure a model.

    Attributes:
        name: `TEXTS@RULES`, the folder of its results.
        about: what it measures, on one line.
        pattern: how names of its kind look, if a number in the name is a setting.
        headline: the total that is cited.
        column: name and format of a column in the comparison of runs; None: it has none.
        has_lengths: whether it has scores by length, for the comparison of runs.
        reads_one_stream: its ranks are sequence ranks by default, because it reads one text from end to end.
    """

    name: str
    about: str
    pattern: str = ""
    headline: str
    column: tuple[str, str] | None = None
    has_lengths: bool = False
    reads_one_stream: bool = False

    def named(self, name: str) -> "Task | None":
        """This task if it has the name, or one of its kind."""
        return self if name == self.name else None

    def open(self, evaluation: Evaluation, family: "Family") -> Measurement:
        """Find and check all that the task reads.

        Raises:
            TostError: a file is missing or damaged, or settings do not fit.
        """
        raise NotImplementedError

    def in_training(self, training: Training, family: "Family") -> MeasuredInTraining:
        """The task during training, with all that it reads.

        Raises:
            ConfigError: it is not measured there; or as `open`, and if the model cannot read it.
        """
        raise ConfigError(f"evaluation.tasks: {self.name} is not measured during training; measure checkpoints")

    def stored(self, evaluation: Evaluation) -> None:
        """Called on rank 0 after its results are written."""

    def cited(self, results: Row) -> float:
        """The value of the headline, for comparisons of runs."""
        return results["model"][self.headline]

    def by_length(self, results: Row) -> Mapping[int, tuple[float, float]]:
        """The cited score and that of the control by length, if it has lengths."""
        raise NotImplementedError


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


def evaluate(evaluation: Evaluation, tasks: Sequence[tuple[Family, Task]]) -> dict[str, TostError]:
    """Measure the tasks that have no results for this checkpoint, and write their results.

    All ranks call it. Every task is checked before the first one is measured. On one rank, a task that fails does not
    stop the others.

    Returns:
        The failures by task.

    Raises:
        TostError: tasks cannot be measured, a line for each problem; on several ranks, also the first failure.
    """
    ranks, evaluated = evaluation.ranks, evaluation.evaluated
    opened = _all_or_problems([lambda f=family, t=task: (t, _open(evaluation, f, t)) for family, task in tasks])
    wanted = [(task, own) for task, own in opened if not ranks.reusable(evaluated, task.name, own.identity)]
    failures: dict[str, TostError] = {}
    if wanted:
        ranks.beat()
        facts = evaluation.model.config
        _all_or_problems([lambda check=own.check: check(facts) for _, own in wanted])
    for task, own in wanted:
        started = time.monotonic()
        ranks.beat()
        try:
            results = own.measure()
        except TostError as error:
            if ranks.mesh:
                raise
            failures[task.name] = error
            continue
        if ranks.rank == 0:
            evaluated.write_results(task.name, own.identity, started, results)
            task.stored(evaluation)
    for note in evaluation.notes:
        print(note)
    return failures


def _open(evaluation: Evaluation, family: Family, task: Task) -> Measurement:
    own = task.open(evaluation, family)
    return own._replace(identity=own.identity | family.identity)


def _all_or_problems(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all calls. Raises TostError with the lines of all that fail."""
    results, problems = [], list[str]()
    for call in calls:
        try:
            results.append(call())
        except TostError as error:
            problems += str(error).splitlines()
    if problems:
        raise TostError("\n".join(dict.fromkeys(problems)))
    return results
