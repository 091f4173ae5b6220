"""The cells of a task. Each is a file of its own, so that an interrupted evaluation resumes:

    eval/TASK/cells/length_00001024_depth_0.50.json    scores and examples; no depth if it is drawn
    eval/TASK/results.json                             scores of all cells

A cell is measured again when its checkpoint, text, seed or number of samples has changed. It does not depend on the
other cells.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError
from tost_lm.evaluation.context_config import FACTS
from tost_lm.evaluation.language_model import ModelFacts
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.retrieval.interface import Task
from tost_lm.evaluation.retrieval.scoring import Scorer, model_scorer, score_cell
from tost_lm.evaluation.subject import Subject
from tost_lm.files import write_atomically
from tost_lm.markdown import with_error

NOT_SCORES = ("protocol", "identity", "seconds", "examples")
"""Keys of a cell's file that are no scores."""


class Cell(NamedTuple):
    """A place in a task's grid."""

    length: int
    depth: float | None

    @property
    def file_name(self) -> str:
        if self.depth is None:
            return f"length_{self.length:08d}.json"
        depth = f"{self.depth:.2f}" if round(self.depth, 2) == self.depth else f"{self.depth!r}"
        return f"length_{self.length:08d}_depth_{depth}.json"


def identity_of(task: Task, settings: dict[str, Any], subject: Subject) -> dict[str, Any]:
    """Everything that the results of a task depend on. `settings` are its lengths, samples, seed and its own."""
    identity = subject.identity(None, task.text and task.text.shards) | (task.text.facts if task.text else {})
    if task.depths != (None,):
        settings = settings | {"depths": list(task.depths)}
    return identity | {"settings": settings}


def measure_tasks(
    ranks: Ranks,
    subject: Subject,
    tokenizer: Tokenizer,
    tasks: Sequence[tuple[Task, dict[str, Any]]],
    lengths: Callable[[Task, ModelFacts], list[int]],
) -> None:
    """Measure the tasks that have no results for this subject, write their results and print them.

    Args:
        tasks: each with its settings, as in `identity_of`.
        lengths: of a task's cells; it is called for all tasks before the first of them is measured.
    """
    chosen = [(task, identity_of(task, settings, subject)) for task, settings in tasks]
    wanted = [(task, identity) for task, identity in chosen if not ranks.reusable(subject, task.name, identity)]
    if not wanted:
        return
    model = ranks.load(subject)
    grids = [Grid(task, identity, subject, lengths(task, model.config)) for task, identity in wanted]
    scorer = model_scorer(model, tokenizer.vocab_size, ranks)
    for grid in grids:
        started = time.monotonic()
        grid.measure(ranks, scorer, tokenizer)
        if ranks.rank == 0:
            results = {"pattern": model.config.pattern, "chance": grid.task.chance, "cells": grid.results()}
            subject.write_results(grid.task.name, grid.identity, started, results)
    print("\nmeans over the examples, with those of the controls in parentheses:")
    for grid in grids:
        print(f"{grid.task.name}, chance {grid.task.chance:.2g}:")
        for cell in grid.results():
            print(f"  {describe(cell)}")


def lengths_of(
    lengths: Sequence[int], samples: int, task: Task, model: ModelFacts, setting: str = "retrieval.lengths"
) -> list[int]:
    """The lengths of a task's cells: those given, else what fits of a quarter, half and all of its positions.

    Args:
        setting: names the lengths in errors.

    Raises:
        ConfigError: a length exceeds the limit, or is too short for needles, question and answer.
        DataError: the haystack's text is shorter than a length.
    """
    needed, limit, max_positions = task.needed(samples), model.position_limit, model.max_positions
    quarters = [max_positions // 4, max_positions // 2, max_positions]
    chosen = list(lengths) or [length for length in quarters if length > needed] or quarters[-1:]
    for length in chosen:
        if limit is not None and length > limit:
            raise ConfigError(f"{setting}: {length} exceeds the model's positions ({limit}); lower it")
        if length <= needed:
            raise ConfigError(
                f"{setting}: {length} tokens are too few for {task.name}, whose texts without a haystack take "
                f"{needed}; raise it"
            )
        if task.text:
            task.text.for_length(length)
    return chosen


class Grid:
    """The cells of one task and their files."""

    def __init__(self, task: Task, identity: dict[str, Any], subject: Subject, lengths: Sequence[int]):
        self.task, self.identity = task, identity
        self.samples: int = identity["settings"]["samples"]
        self.cells = [Cell(length, depth) for length in lengths for depth in task.depths]
        self.folder = subject.results_path(task.name).parent / "cells"

    def measure(self, ranks: Ranks, scorer: Scorer, tokenizer: Tokenizer) -> None:
        """Measure the cells that have no results. All ranks call it, and the copies of the model share the cells.
        When it returns, all files exist."""
        # All ranks use what rank 0 finds: with different lists, they would wait for each other forever.
        exists = ranks.gather([self._exists(cell) for cell in self.cells])[0]
        if any(exists):
            print(f"{self.task.name}: reusing {sum(exists)} of {len(exists)} cells", flush=True)
        todo = [cell for cell, done in zip(self.cells, exists, strict=True) if not done]
        for cell in todo[ranks.copy :: ranks.copies]:
            started = time.monotonic()
            scores, rows = score_cell(self.task, tokenizer, scorer, cell.length, cell.depth, self.samples)
            result = {
                "protocol": self.task.name, "identity": self._identity(cell), **cell._asdict(), "samples": self.samples,
                **scores, "seconds": time.monotonic() - started, "examples": rows,
            }  # fmt: skip
            if ranks.is_first_of_copy:
                write_atomically(self.folder / cell.file_name, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
            print(f"{self.task.name}: {describe(result)}", flush=True)
        ranks.wait_for_copies()

    def results(self) -> list[dict[str, Any]]:
        """The scores of all cells that exist, also of earlier calls, by length and depth."""
        kept = []
        for path in self.folder.glob("length_*.json"):
            try:
                cell = json.loads(path.read_bytes())
                if cell["identity"] == self._identity(Cell(cell["length"], cell["depth"])):
                    kept.append({k: v for k, v in cell.items() if k not in NOT_SCORES})
            except (ValueError, KeyError, TypeError):
                continue  # damaged; `measure` replaces it
        return sorted(kept, key=lambda cell: (cell["length"], cell["depth"] or 0))

    def _identity(self, cell: Cell) -> dict[str, Any]:
        """Everything that a cell depends on, without the settings of other cells."""
        settings = {k: v for k, v in self.identity["settings"].items() if k not in ("lengths", "depths")}
        return self.identity | {"settings": settings | cell._asdict()}

    def _exists(self, cell: Cell) -> bool:
        try:
            return json.loads((self.folder / cell.file_name).read_bytes())["identity"] == self._identity(cell)
        except (OSError, ValueError, KeyError, TypeError):
            return False


def describe(cell: dict[str, Any]) -> str:
    """A line for a cell, with the scores of its control in parentheses."""
    place = f"length {cell['length']:>9,}" + ("" if cell["depth"] is None else f"  depth {cell['depth']:<5g}")
    place += "".join(f"  {name} {cell[name]:,}" for name in FACTS if name in cell)
    names = {"choice_accuracy": "choice", "found_share": "found", "exact_accuracy": "exact", "token_accuracy": "tokens"}
    scores = [f"{name} {cell[key]:6.1%} ({cell[f'control_{key}']:.1%})" for key, name in names.items() if key in cell]
    nats = f"{cell['answer_nats']:.2f} ({cell['control_answer_nats']:.2f}) nats"
    gains = [
        f"{key.replace('_', ' ')} {with_error(gain, cell[f'{key}_standard_error'], '+.3f')} nats/token"
        for key, gain in cell.items() if key.startswith("gain_over_") and not key.endswith("_error")
    ]  # fmt: skip
    return "  ".join([place, *scores, nats, *gains])
