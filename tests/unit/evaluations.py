"""Evaluations by the code of `tost eval`."""

from pathlib import Path
from typing import Any

from tost_lm.config import validate
from tost_lm.eval.commands.evaluate import main
from tost_lm.tasks.registry import FAMILIES, find_task
from tost_lm.tasks.scored import ScoredTask
from tost_lm.tasks.settings import EvalConfig

RULER = [task.name for task in FAMILIES["ruler"].tasks]
RETRIEVAL = ["needle@words", *RULER]
CONTEXT = [task.name for task in FAMILIES["context"].tasks]


def evaluate(path: Path, *tasks: str, **sections: Any) -> None:
    """Measure a run or model by tasks; `sections` are the settings."""
    main(path, validate(EvalConfig, {"tasks": tasks, **sections}, "test"))


def scored(name: str) -> ScoredTask:
    """A task on a test set."""
    _, task = find_task(name)
    assert isinstance(task, ScoredTask)
    return task
