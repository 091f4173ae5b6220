"""The cells of a task. Each is a file of its own, so that an interrupted evaluation resumes:

    eval/TASK/cells/length_00001024_depth_0.50.json    scores and examples; no depth if it is drawn
    eval/TASK/results.json                             scores of all cells

A cell is measured again when its checkpoint, text, seed or number of samples has changed. It does not depend on the
other cells.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tost_lm.errors import ConfigError
from tost_lm.inference.effective_length import ACCURACIES, accuracy_of, effective_lengths
from tost_lm.inference.evaluated import read_result_file, write_result_file
from tost_lm.inference.ranks import Ranks
from tost_lm.intervals import wilson
from tost_lm.markdown import format_chance, table, with_error, with_interval
from tost_lm.page import Chart, Page, draw_heatmap, new_panels
from tost_lm.tasks.evaluated_model import EvaluatedModel, checkpoint_of
from tost_lm.tasks.haystacks import Text
from tost_lm.tasks.queries import GridConfig, Queries, QuerySource
from tost_lm.tasks.task import Family, Inputs, Measure, Measurement, Place, Row, Task

if TYPE_CHECKING:
    from tost_lm.inference.generation import LanguageModel, ModelFacts
    from tost_lm.tasks.answers import Scorer

FEW_EXAMPLES = 25
"""With fewer the 95 % interval of an accuracy may be wider than ± 18 %."""


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


class GridTask(Task):
    """A task with cells, whose queries have exact lengths and controls."""

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
            make: its class of queries, or a function with the same arguments.
        """
        self.name, self.about, self.make, self.headline, self.column = name, about, make, headline, column

    def open(self, inputs: Inputs, family: Family) -> Measurement:
        settings = family.settings_in(inputs.config)
        queries = self.make(
            self.name, QuerySource(settings, inputs.lossless_tokenizer, partial(find_text, settings, inputs))
        )
        text = queries.text

        def prepare(model: "ModelFacts") -> Measure:
            if (fewest := settings.samples * len(queries.depths)) < FEW_EXAMPLES:
                low, high = wilson(0.5, fewest)
                inputs.notes[
                    f"warning: with {fewest} examples of a length, the 95 % interval of an accuracy is up to "
                    f"{low:.0%} to {high:.0%}; raise {settings.section}.samples"
                ] = None
            grid = Grid(queries, queries.lengths(settings, model), settings.samples)
            return partial(self._measure, grid, settings)

        identity = {"settings": queries.identity(settings), **(text.facts if text else {})}
        return Measurement(identity, prepare, text and text.shards)

    @staticmethod
    def _measure(grid: "Grid", settings: GridConfig, model: "LanguageModel", ranks: Ranks, place: Place | None) -> Row:
        from tost_lm.tasks.answers import model_scorer

        scorer = model_scorer(model, grid.queries.tokenizer.vocab_size, ranks)
        cells = grid.stored(ranks, scorer, place) if place else [grid.measure(cell, scorer)[0] for cell in grid.cells]
        results = {"pattern": model.config.pattern, "chance": grid.queries.chance, "cells": cells}
        print(table(HEADER, rows_of(grid.queries.name, results)))
        results["threshold"] = settings.threshold
        (found,) = effective_lengths({grid.queries.name: results})
        results["effective_length"] = {"tokens": found.tokens, "low": found.low, "high": found.high}
        print(f"effective length: {found.shown}; {found.about}")
        return results

    def totals_of(self, results: Row) -> Row:
        keys = self.headline, f"control_{self.headline}"
        by_length = {f"{self.headline}_at_{n}": row["score"] for n, row in self.by_length(results).items()}
        effective = {f"effective_length_{key}": n for key, n in results.get("effective_length", {}).items()}
        return over_cells(results["cells"], keys) | by_length | effective

    def cited(self, results: Row) -> float:
        return over_cells(results["cells"], [self.headline])[self.headline]

    def by_length(self, results: Row) -> dict[int, Row]:
        """By length, the cited `score`, that of the `control`, and the number of `samples`."""
        keys = self.headline, f"control_{self.headline}"
        means = {n: over_cells(own, keys) for n, own in cells_by_length(results["cells"]).items()}
        return {
            length: {"score": own[keys[0]], "control": own[keys[1]], "samples": own["samples"]}
            for length, own in means.items()
        }


def find_text(settings: GridConfig, inputs: Inputs) -> Text:
    """The text of haystacks: the file of the settings, else the held-out documents, else Python's documentation. The
    tokenizer may lose text of it.

    Raises:
        DataError: the file is missing, empty or not UTF-8; or as `Inputs.open_shards`.
    """
    file, tokenizer = settings.haystack, inputs.tokenizer
    if file not in inputs.texts:
        if file:
            inputs.texts[file] = Text.of_file(file, tokenizer)
        elif inputs.has_shards:
            inputs.texts[file] = Text.of_shards(inputs.open_shards(), tokenizer)
        else:
            inputs.texts[file] = Text.embedded(tokenizer)
    return inputs.texts[file]


class Grid:
    """The cells of one task."""

    def __init__(self, queries: Queries, lengths: Sequence[int], samples: int):
        self.queries, self.samples = queries, samples
        self.cells = [Cell(length, depth) for length in lengths for depth in queries.depths]

    def measure(self, cell: Cell, scorer: "Scorer") -> tuple[Row, list[Row]]:
        """The scores of a cell, and a row for each example and condition."""
        from tost_lm.tasks.answers import score_cell

        scores, rows = score_cell(self.queries, scorer, *cell, self.samples)
        return {**cell._asdict(), "samples": self.samples, **scores}, rows

    def stored(self, ranks: Ranks, scorer: "Scorer", place: Place) -> list[Row]:
        """The scores of all cells with files, also of earlier calls, by length and depth.

        Cells without a file are measured. All ranks call it, and the copies of the model share the cells."""
        # All ranks use what rank 0 finds: with different lists, they would wait for each other forever.
        found = _stored(place)
        exists = ranks.gather([cell in found for cell in self.cells])[0]
        if any(exists):
            print(f"{self.queries.name}: reusing {sum(exists)} of {len(exists)} cells", flush=True)
        todo = [cell for cell, done in zip(self.cells, exists, strict=True) if not done][ranks.copy :: ranks.copies]
        for cell in todo:
            started = time.monotonic()
            scores, rows = self.measure(cell, scorer)
            result = {
                "protocol": self.queries.name, "identity": _identity(place, cell), **scores,
                "seconds": time.monotonic() - started, "examples": rows,
            }  # fmt: skip
            if ranks.is_first_of_copy:
                write_result_file(place.folder / "cells" / f"{cell.name}.json", result)
            print(f"{self.queries.name}: {cell.name}, {result['seconds']:.1f} s", flush=True)
        ranks.wait_for_copies()
        found = _stored(place)
        return [{key: found[cell][key] for key in found[cell] if key not in NOT_SCORES} for cell in sorted(found)]


def _identity(place: Place, cell: Cell) -> Row:
    """Everything that a cell depends on, without the settings of other cells."""
    return place.identity | {"settings": without_cells(place.identity["settings"]) | cell._asdict()}


def without_cells(settings: Row) -> Row:
    """The settings that every cell depends on."""
    return {key: value for key, value in settings.items() if key not in ("lengths", "depths", "threshold")}


def _stored(place: Place) -> dict[Cell, Row]:
    """The cells with a file. Files that are damaged, edited or of another identity are left out, and replaced."""
    found = {}
    for file in (place.folder / "cells").glob("length_*.json"):
        with suppress(ConfigError, OSError):
            row = read_result_file(file)
            if row and row["identity"] == _identity(place, cell := Cell(row["length"], row["depth"])):
                found[cell] = row
    return found


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


def section(run: EvaluatedModel, page: Page) -> str:
    """The section of the report on all tasks with cells; empty without results."""
    files = sorted(run.folder.glob("eval/*@*/results.json"))
    found = {name: results for name in (path.parent.name for path in files) if (results := run.results(name))}
    found = {name: results for name, results in found.items() if "cells" in results}
    if not found:
        return ""
    paragraphs = [
        "## Retrieval",
        page.add_figure("retrieval", cells_chart(found), "Accuracy by task and length, with control"),
        table(
            (*HEADER, "checkpoint"),
            [(*row, checkpoint_of(run, results)) for name, results in found.items() for row in rows_of(name, results)],
        ),
        *(f"**Effective length: {own.shown}**; {own.about}." for own in effective_lengths(found)),
        "Scores: found, the fraction of the expected strings in the greedily generated text; choice, whether the right "
        "answer is the likeliest of several; tokens, the fraction of answer tokens that are the most likely ones. "
        "Exact: all of them are. The text of the control lacks the answer. Gain: nats per token by which the text "
        "lowers the answer, against the control. Chance: the score of a guess, in needle and niah_multikey_1 "
        "among the values in the text, else without the text. Parentheses: the 95 % interval over texts (Wilson's). "
        "±: the standard error over texts. The figure's CSV file has all scores.",
    ]
    if {letter for results in found.values() for letter in results["pattern"]} == {"T"}:
        paragraphs.append(
            "Pure TSSA keeps statistics of the past instead of the tokens. It is not expected to recall an exact word, "
            "so chance level is no defect."
        )
    return "\n\n".join(paragraphs)


HEADER = ("task", "chance", "tokens", "examples", "score", "control", "exact", "gain")


def rows_of(name: str, results: Row) -> list[tuple[str, ...]]:
    """A row for each length of a task."""
    rows = []
    for length, cells in cells_by_length(results["cells"]).items():
        key = accuracy_of(cells[0])
        means = over_cells(cells, (key, "exact_accuracy", f"control_{key}", "gain_over_control"))
        gain = with_error(means["gain_over_control"], means["gain_over_control_standard_error"], "+.3f")
        score = f"{ACCURACIES[key]} {with_interval(means[key], means['samples'], '.1%')}"
        rows.append((
            name, format_chance(results["chance"]), f"{length:,}", f"{means['samples']:,}", score,
            f"{means[f'control_{key}']:.1%}", f"{means['exact_accuracy']:.1%}", gain,
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
            percent_RL[place] = 100 * cell[prefix + accuracy_of(cell)]
        image = draw_heatmap(axes, percent_RL, lengths, names)
        axes.set_title("control" if prefix else "score")
    figure.colorbar(image, ax=panels, label="accuracy (%)")
    header = list(dict.fromkeys(key for cell in cells for key in cell))
    return Chart(figure, header, [[cell.get(key, "") for key in header] for cell in cells])
