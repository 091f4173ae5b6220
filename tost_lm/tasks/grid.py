"""The cells of a task. Each is a file of its own, so that an interrupted evaluation resumes:

    eval/TASK/cells/length_00001024_depth_0.50.json    scores and examples; no depth if it is drawn
    eval/TASK/results.json                             scores of all cells

A cell is measured again when its checkpoint, text, seed or number of samples has changed. It does not depend on the
other cells.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError
from tost_lm.files import sha256_bytes
from tost_lm.inference.evaluated import EvaluatedCheckpoint, read_result_file, write_result_file
from tost_lm.inference.ranks import Ranks
from tost_lm.markdown import format_chance, table, with_error
from tost_lm.page import Chart, Page, draw_heatmap, new_panels
from tost_lm.tasks.haystacks import Text
from tost_lm.tasks.queries import Examples, GridConfig, Queries
from tost_lm.tasks.sections import EvaluatedModel, checkpoint_of
from tost_lm.tasks.task import Evaluation, Family, MeasuredInTraining, Measurement, Row, Task, Training

if TYPE_CHECKING:
    from tost_lm.inference.generation import LanguageModel
    from tost_lm.tasks.answers import Scorer

ACCURACIES = {"choice_accuracy": "choice", "found_share": "found", "token_accuracy": "tokens"}
"""Scores by precedence, and their names in tables: a task's accuracy is the first that it has."""
FEW_EXAMPLES = 25
"""With fewer the standard error of an accuracy may exceed 10 %."""


NOT_SCORES = ("protocol", "identity", "seconds", "examples")
"""Keys of a cell's file that are no scores."""


class Cell(NamedTuple):
    """A place in a task's grid."""

    length: int
    depth: float | None

    @property
    def name(self) -> str:
        """Name of the cell's files."""
        if self.depth is None:
            return f"length_{self.length:08d}"
        depth = f"{self.depth:.2f}" if round(self.depth, 2) == self.depth else f"{self.depth!r}"
        return f"length_{self.length:08d}_depth_{depth}"


@dataclass(frozen=True)
class QuerySource:
    """The settings, tokenizer and text that queries are made from."""

    settings: Any
    """A GridConfig."""
    tokenizer: Tokenizer
    find_text: Callable[[], Text]
    texts: dict[Any, Text] = field(default_factory=dict)
    """Those that other tasks have read, by section and file."""

    @property
    def text(self) -> Text:
        """The text of haystacks, found on first use."""
        key = self.settings.section, self.settings.haystack
        if key not in self.texts:
            self.texts[key] = self.find_text()
        return self.texts[key]


class GridTask(Task):
    """A task with cells, whose queries have exact lengths and controls."""

    has_lengths = True

    def __init__(
        self,
        name: str,
        about: str,
        make: Callable[[str, QuerySource], Queries],
        headline: str = "found_share",
        column: tuple[str, str] | None = None,
    ):
        """
        Args:
            make: returns its queries, given its name. Raises TostError if there is no text for them.
        """
        self.name, self.about, self.make, self.headline, self.column = name, about, make, headline, column

    def open(self, evaluation: Evaluation, family: Family) -> Measurement:
        settings = family.settings_in(evaluation.config)
        shards, evaluated = evaluation.config.heldout.shards, evaluation.evaluated
        text = partial(find_text, settings.haystack, shards, evaluated, family.name)
        queries = self.make(self.name, QuerySource(settings, evaluation.tokenizer, text, evaluation.texts))
        identity = identity_of(queries, queries.identity(settings), evaluated) | family.identity
        measure = partial(self._measure, evaluation, settings, queries, identity)
        return Measurement(identity, measure, partial(queries.lengths, settings))

    def _measure(self, evaluation: Evaluation, settings: GridConfig, queries: Queries, identity: Row) -> Row:
        from tost_lm.tasks.answers import model_scorer

        model, ranks, tokenizer = evaluation.model, evaluation.ranks, evaluation.tokenizer
        lengths = queries.lengths(settings, model.config)
        grid = Grid(queries, identity, evaluation.evaluated, lengths)
        grid.measure(ranks, model_scorer(model, tokenizer.vocab_size, ranks), tokenizer)
        if (fewest := grid.samples * len(queries.depths)) < FEW_EXAMPLES:
            evaluation.notes[
                f"warning: with {fewest} examples of a length, the standard error of an accuracy is up to "
                f"{0.5 / fewest**0.5:.0%}; raise {settings.section}.samples"
            ] = None
        return {"pattern": model.config.pattern, "chance": queries.chance, "cells": grid.results()}

    def in_training(self, training: Training, family: Family) -> MeasuredInTraining:
        settings, tokenizer = family.settings_in(training.config), training.tokenizer

        def text() -> Text:
            if settings.haystack:
                return Text.of_file(settings.haystack, tokenizer, family.name)
            return Text.of_shards(training.shards, tokenizer, family.name)

        queries = self.make(self.name, QuerySource(settings, tokenizer, text, training.texts))
        places = [(length, d) for length in queries.lengths(settings, training.model) for d in queries.depths]
        identity = queries.identity(settings) | {"places": places, **(queries.text.facts if queries.text else {})}
        if queries.text and queries.text.shards:
            identity["shards"] = queries.text.shards.fingerprint

        def measure(model: "LanguageModel", ranks: Ranks) -> Row:
            from tost_lm.tasks.answers import model_scorer, score_cell

            scorer, cells = model_scorer(model, tokenizer.vocab_size, ranks), []
            for length, depth in places:
                examples = Examples(queries, length, depth, settings.samples)
                scores, _ = score_cell(queries, tokenizer, scorer, examples)
                cells.append({"length": length, "samples": settings.samples, **scores})
            keys = self.headline, f"control_{self.headline}"
            by_length = {f"{self.headline}_at_{length}": score for length, (score, _) in self._means(cells).items()}
            return over_cells(cells, keys) | by_length

        return MeasuredInTraining(sha256_bytes(json.dumps(identity).encode()), measure)

    def cited(self, results: Row) -> float:
        return mean_score(results["cells"], self.headline)

    def by_length(self, results: Row) -> dict[int, tuple[float, float]]:
        return self._means(results["cells"])

    def _means(self, cells: Sequence[Row]) -> dict[int, tuple[float, float]]:
        keys = self.headline, f"control_{self.headline}"
        return {
            length: (mean_score(own, keys[0]), mean_score(own, keys[1]))
            for length, own in cells_by_length(cells).items()
        }


def find_text(file: Path | None, shards: str, evaluated: EvaluatedCheckpoint, section: str) -> Text:
    """The text in `file`, else the held-out documents, else Python's documentation. The tokenizer may lose text of it.

    Args:
        shards: as in `EvaluatedCheckpoint.open_shards`.
        section: of the settings, for errors.

    Raises:
        DataError: the file is missing, empty or not UTF-8, or as in `EvaluatedCheckpoint.open_shards`.
        ConfigError: as in `EvaluatedCheckpoint.open_shards`.
    """
    tokenizer = evaluated.tokenizer()
    if file is not None:
        return Text.of_file(file, tokenizer, section)
    if shards or (evaluated.home / "config.toml").is_file():
        return Text.of_shards(evaluated.open_shards(shards), tokenizer, section)
    return Text.embedded(tokenizer, section)


def identity_of(queries: Queries, settings: Row, evaluated: EvaluatedCheckpoint) -> Row:
    """Everything that the results of a task depend on. `settings` are its lengths, samples, seed and its own."""
    text = queries.text
    identity = evaluated.identity(None, text and text.shards) | (text.facts if text else {})
    if queries.depths != (None,):
        settings = settings | {"depths": list(queries.depths)}
    return identity | {"settings": settings}


class Grid:
    """The cells of one task and their files."""

    def __init__(self, queries: Queries, identity: Row, evaluated: EvaluatedCheckpoint, lengths: Sequence[int]):
        self.queries, self.identity = queries, identity
        self.samples: int = identity["settings"]["samples"]
        self.cells = [Cell(length, depth) for length in lengths for depth in queries.depths]
        self.folder = evaluated.results_path(queries.name).parent / "cells"

    def measure(self, ranks: Ranks, scorer: "Scorer", tokenizer: Tokenizer) -> None:
        """Measure the cells that have no results. All ranks call it, and the copies of the model share the cells.
        When it returns, all files exist."""
        from tost_lm.tasks.answers import score_cell

        # All ranks use what rank 0 finds: with different lists, they would wait for each other forever.
        exists = ranks.gather([self._stored(self._file(cell)) is not None for cell in self.cells])[0]
        if any(exists):
            print(f"{self.queries.name}: reusing {sum(exists)} of {len(exists)} cells", flush=True)
        todo = [cell for cell, done in zip(self.cells, exists, strict=True) if not done]
        lengths = list(dict.fromkeys(cell.length for cell in self.cells))
        for cell in todo[ranks.copy :: ranks.copies]:
            started = time.monotonic()
            examples = Examples(self.queries, *cell, self.samples)
            scores, rows = score_cell(self.queries, tokenizer, scorer, examples)
            result = {
                "protocol": self.queries.name, "identity": self._identity(cell), **cell._asdict(),
                "samples": self.samples, **self.queries.facts(cell.length), **scores,
                "seconds": time.monotonic() - started, "examples": rows,
            }  # fmt: skip
            if ranks.is_first_of_copy:
                write_result_file(self._file(cell), result)
            if ranks.rank == 0:
                self._print_complete(lengths)
        ranks.wait_for_copies()
        if ranks.rank == 0:
            self._print_complete(lengths)

    def results(self) -> list[dict[str, Any]]:
        """The scores of all cells that exist, also of earlier calls, by length and depth."""
        stored = filter(None, map(self._stored, self.folder.glob("length_*.json")))
        scores = [{key: value for key, value in cell.items() if key not in NOT_SCORES} for cell in stored]
        return sorted(scores, key=lambda cell: (cell["length"], cell["depth"] or 0))

    def _file(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"

    def _identity(self, cell: Cell) -> dict[str, Any]:
        """Everything that a cell depends on, without the settings of other cells."""
        return self.identity | {"settings": self._settings(cell)}

    def _settings(self, cell: Cell) -> dict[str, Any]:
        settings = {k: v for k, v in self.identity["settings"].items() if k not in ("lengths", "depths")}
        return settings | cell._asdict()

    def _stored(self, file: Path) -> dict[str, Any] | None:
        """A cell; None: its file is missing, damaged, edited or of another identity, and `measure` replaces it."""
        with suppress(ConfigError, OSError):
            cell = read_result_file(file)
            if cell and cell["identity"] == self._identity(Cell(cell["length"], cell["depth"])):
                return cell
        return None

    def _print_complete(self, lengths: list[int]) -> None:
        """Print the lengths whose cells all exist, and remove them from the list."""
        for length in list(lengths):
            cells = [self._stored(self._file(cell)) for cell in self.cells if cell.length == length]
            if len(complete := [cell for cell in cells if cell]) == len(cells):
                words = describe(complete, self.queries.facts(length))
                print(f"{self.queries.name}: {words}  chance {format_chance(self.queries.chance)}", flush=True)
                lengths.remove(length)


def describe(cells: Sequence[Row], facts: Mapping[str, int]) -> str:
    """The accuracy over the cells of a length beside that of the control, and the gain where the answer is a text."""
    first = cells[0]
    key = _accuracy(first)
    means = over_cells(cells, (key, f"control_{key}"))
    words = [f"length {first['length']:>9,}", *(f"{name} {value:,}" for name, value in facts.items())]
    words.append(f"{ACCURACIES[key]} {with_error(means[key], means[f'{key}_standard_error'], '.1%')}")
    words.append(f"control {means[f'control_{key}']:.1%}")
    if key == "token_accuracy":
        gain = with_error(first["gain_over_control"], first["gain_over_control_standard_error"], "+.3f")
        words.append(f"gain over control {gain} nats/token")
    return "  ".join(words)


def over_cells(cells: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """Means over the examples of cells, with the standard errors of independent examples."""
    samples = sum(cell["samples"] for cell in cells)
    means: dict[str, Any] = {"samples": samples}
    for key in keys:
        errors = [cell[f"{key}_standard_error"] for cell in cells]
        means[key] = sum(cell[key] * cell["samples"] for cell in cells) / samples
        means[f"{key}_standard_error"] = (
            None
            if None in errors
            else sum((cell["samples"] * error) ** 2 for cell, error in zip(cells, errors, strict=True)) ** 0.5 / samples
        )
    return means


def cells_by_length(cells: Sequence[Row]) -> dict[int, list[Row]]:
    """The cells of each length, ascending."""
    return {length: [c for c in cells if c["length"] == length] for length in sorted({c["length"] for c in cells})}


def mean_score(cells: Sequence[Row], key: str) -> float:
    """Mean over all examples of the cells."""
    return sum(cell[key] * cell["samples"] for cell in cells) / sum(cell["samples"] for cell in cells)


def _accuracy(cell: Row) -> str:
    """The key of the accuracy that stands for a task."""
    return next(key for key in ACCURACIES if key in cell)


def section(run: EvaluatedModel, page: Page) -> str:
    """The section of the report on all tasks with cells; empty without results."""
    files = sorted(run.folder.glob("eval/*@*/results.json"))
    found = {name: results for name in (path.parent.name for path in files) if (results := run.results(name))}
    found = {name: results for name, results in found.items() if "cells" in results}
    if not found:
        return ""
    header = ("task", "chance", "tokens", "examples", "score", "control", "exact", "gain", "checkpoint")
    paragraphs = [
        "## Retrieval and use of context",
        page.add_figure("context", cells_chart(found), "Accuracy by task and length, with control"),
        table(
            header,
            [row for name, results in found.items() for row in _rows(name, results, checkpoint_of(run, results))],
        ),
        "Scores: found, the fraction of the expected strings in the greedily generated text; choice, whether the right "
        "answer is the likeliest of several; tokens, the fraction of answer tokens that are the most likely ones. "
        "Exact: all of them are. The text of the control lacks the answer. Gain: nats per token by which the text "
        "lowers the answer, against the control. ± is the standard error over the examples. The figure's CSV "
        "file has all scores.",
    ]
    if {letter for results in found.values() for letter in results["pattern"]} == {"T"}:
        paragraphs.append(
            "Pure TSSA keeps statistics of the past instead of the tokens. It is not expected to recall an exact word, "
            "so chance level is no defect."
        )
    return "\n\n".join(paragraphs)


def _rows(name: str, results: Row, checkpoint: str) -> list[tuple[str, ...]]:
    """A row for each length of a task."""
    rows = []
    for length, cells in cells_by_length(results["cells"]).items():
        key = _accuracy(cells[0])
        means = over_cells(cells, (key, "exact_accuracy", f"control_{key}", "gain_over_control"))
        score, gain = (
            with_error(means[of], means[f"{of}_standard_error"], form)
            for of, form in ((key, ".1%"), ("gain_over_control", "+.3f"))
        )
        rows.append((
            name, format_chance(results["chance"]), f"{length:,}", f"{means['samples']:,}",
            f"{ACCURACIES[key]} {score}", f"{means[f'control_{key}']:.1%}", f"{means['exact_accuracy']:.1%}", gain,
            checkpoint,
        ))  # fmt: skip
    return rows


def cells_chart(found: Mapping[str, Row]) -> Chart:
    """The accuracy of each task by length, and by depth if it has depths, with that of the control."""
    cells = [{"task": name, **cell} for name, results in found.items() for cell in results["cells"]]
    lengths = sorted({cell["length"] for cell in cells})
    rows = list(dict.fromkeys((cell["task"], cell["depth"]) for cell in cells))
    names = [task.split("@")[0] + ("" if depth is None else f", depth {depth:g}") for task, depth in rows]
    figure, panels = new_panels(4 + 1.5 * len(lengths), 1.6 + 0.4 * len(rows), 2, sharey=True)
    image: Any = None
    for axes, prefix in zip(panels, ("", "control_"), strict=True):
        percent_RL = np.full((len(rows), len(lengths)), np.nan)
        for cell in cells:
            place = rows.index((cell["task"], cell["depth"])), lengths.index(cell["length"])
            percent_RL[place] = 100 * cell[prefix + _accuracy(cell)]
        image = draw_heatmap(axes, percent_RL, lengths, names)
        axes.set_title("control" if prefix else "score")
    figure.colorbar(image, ax=panels, label="accuracy (%)")
    header = list(dict.fromkeys(key for cell in cells for key in cell))
    return Chart(figure, header, [[cell.get(key, "") for key in header] for cell in cells])
