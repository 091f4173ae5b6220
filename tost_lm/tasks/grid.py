"""The lengths of a task. Each is a file of its own, so that an interrupted evaluation resumes:

    eval/TASK/lengths/00001024.json    scores and examples
    eval/TASK/results.json             scores of all lengths

A length is measured again when its checkpoint, text, depths, seed or number of samples has changed. It does not depend
on the other lengths.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from tost_lm.tasks.over_texts import totals_of
from tost_lm.tasks.queries import HaystackConfig, Queries, QuerySource
from tost_lm.tasks.task import Family, Inputs, Measure, Measurement, Place, Row, Task

if TYPE_CHECKING:
    from tost_lm.inference.generation import LanguageModel, ModelFacts
    from tost_lm.tasks.answers import Scorer

FEW_EXAMPLES = 25
"""With fewer the 95 % interval of an accuracy may be wider than ± 18 %."""


NOT_SCORES = ("protocol", "identity", "seconds", "examples")
"""Keys of a length's file that are no scores."""


class GridTask(Task):
    """A task with lengths: questions about texts."""

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
            self.name,
            QuerySource(family.name, settings, inputs.lossless_tokenizer, partial(find_text, settings, inputs)),
        )
        text = queries.text

        def prepare(model: "ModelFacts") -> Measure:
            if settings.samples < FEW_EXAMPLES:
                low, high = wilson(0.5, settings.samples)
                inputs.notes[
                    f"warning: with {settings.samples} texts of a length, the 95 % interval of an accuracy is up to "
                    f"{low:.0%} to {high:.0%}; raise {family.name}.samples"
                ] = None
            return partial(self._measure, queries, queries.lengths(model))

        identity = {"settings": queries.identity, **(text.facts if text else {})}
        return Measurement(identity, prepare, text and text.shards)

    @staticmethod
    def _measure(
        queries: Queries, lengths: Sequence[int], model: "LanguageModel", ranks: Ranks, place: Place | None
    ) -> Row:
        from tost_lm.tasks.answers import model_scorer

        stop = queries.tokenizer.stop if place else None  # in training, all copies call the model equally often
        scorer = model_scorer(model, queries.tokenizer.vocab_size, stop, ranks)
        if place:
            cells = measure_missing(queries, lengths, scorer, ranks, place)
        else:
            cells = [measure(queries, length, scorer, ranks)[0] for length in lengths]
        results = {"pattern": model.config.pattern, "chance": queries.chance, "cells": cells}
        print(table(HEADER, rows_of(queries.name, results)))
        results["threshold"] = queries.settings.threshold
        (found,) = effective_lengths({queries.name: results})
        results["effective_length"] = {"tokens": found.tokens, "low": found.low, "high": found.high}
        print(f"effective length: {found.shown}; {found.about}")
        return results

    def totals_of(self, results: Row) -> Row:
        keys = [key for key in (self.headline, f"control_{self.headline}") if key in results["cells"][0]]
        by_length = {f"{self.headline}_at_{n}": row["score"] for n, row in self.by_length(results).items()}
        effective = {f"effective_length_{key}": n for key, n in results.get("effective_length", {}).items()}
        return over_lengths(results["cells"], keys) | by_length | effective

    def cited(self, results: Row) -> float:
        return over_lengths(results["cells"], [self.headline])[self.headline]

    def by_length(self, results: Row) -> dict[int, Row]:
        """By length, the cited `score`, that of the `control` if there is one, and the number of `samples`."""
        keys = {"score": self.headline, "control": f"control_{self.headline}", "samples": "samples"}
        return {
            cell["length"]: {name: cell[key] for name, key in keys.items() if key in cell} for cell in results["cells"]
        }


def find_text(settings: HaystackConfig, inputs: Inputs) -> Text:
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


def measure(queries: Queries, length: int, scorer: "Scorer", ranks: Ranks) -> tuple[Row, list[Row]]:
    """The scores of a length, also by depth, and a row for each question. All ranks call it, and the copies of the
    model share the texts."""
    from tost_lm.tasks.answers import score_texts

    own = score_texts(queries, scorer, length, range(ranks.copy, queries.settings.samples, ranks.copies))
    together = {sample: rows for pairs in ranks.gather(list(own.items())) for sample, rows in pairs}
    rows = [row for sample in sorted(together) for row in together[sample]]
    scores = {"length": length, "samples": len(together), **totals_of(rows)}
    depths = sorted({row["depth"] for row in rows if "depth" in row})
    by_depth = [{"depth": depth, **totals_of([row for row in rows if row["depth"] == depth])} for depth in depths]
    return scores | ({"depths": by_depth} if by_depth else {}), rows


def measure_missing(
    queries: Queries, lengths: Sequence[int], scorer: "Scorer", ranks: Ranks, place: Place
) -> list[Row]:
    """The scores of all lengths with files, also of earlier calls, ascending; lengths without a file are measured."""
    # All ranks use what rank 0 finds: with different lists, they would wait for each other forever.
    found = _stored(place)
    exists = ranks.gather([length in found for length in lengths])[0]
    if any(exists):
        print(f"{queries.name}: reusing {sum(exists)} of {len(exists)} lengths", flush=True)
    for length in compress(lengths, map(not_, exists)):
        started = time.monotonic()
        scores, rows = measure(queries, length, scorer, ranks)
        seconds = time.monotonic() - started
        result = {
            "protocol": queries.name, "identity": _identity(place, length), **scores, "seconds": seconds,
            "examples": rows,
        }  # fmt: skip
        if ranks.rank == 0:
            write_result_file(length_file(place.folder, length), result)
        print(f"{queries.name}: {length:,} tokens, {seconds:.1f} s", flush=True)
        found[length] = result
    return [{key: found[n][key] for key in found[n] if key not in NOT_SCORES} for n in sorted(found)]


def length_file(folder: Path, length: int) -> Path:
    """The file of a length in the folder of a task's results."""
    return folder / "lengths" / f"{length:08d}.json"


def _identity(place: Place, length: int) -> Row:
    """Everything that a length depends on, without the settings of other lengths."""
    return place.identity | {"settings": without_lengths(place.identity["settings"]) | {"length": length}}


def without_lengths(settings: Row) -> Row:
    """The settings that every length depends on."""
    return {key: value for key, value in settings.items() if key not in ("lengths", "threshold")}


def _stored(place: Place) -> dict[int, Row]:
    """The lengths with a file. Files that are damaged, edited or of another identity are left out, and replaced."""
    found = {}
    for file in (place.folder / "lengths").glob("*.json"):
        with suppress(ConfigError, OSError):
            row = read_result_file(file)
            if row and row["identity"] == _identity(place, row["length"]):
                found[row["length"]] = row
    return found


def over_lengths(cells: Sequence[Row], keys: Sequence[str]) -> Row:
    """Means over the texts of all lengths, with the standard errors of independent texts."""
    samples = sum(cell["samples"] for cell in cells)
    means: Row = {"samples": samples}
    for key in keys:
        means[key] = sum(cell[key] * cell["samples"] for cell in cells) / samples
        errors = [(cell["samples"], cell[f"{key}_standard_error"]) for cell in cells]
        squares = [(count * error) ** 2 for count, error in errors if error is not None]
        means[f"{key}_standard_error"] = sum(squares) ** 0.5 / samples if len(squares) == len(cells) else None
    return means


def section(run: EvaluatedModel, page: Page) -> str:
    """The section of the report on all tasks with lengths; empty without results."""
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
        "Exact: all of them are. The control asks for what is not in the text. Gain: nats per token by which the text "
        "lowers the answer, against the control. Chance: the score of a guess among the values in the text, or "
        "without the text if it has one. Parentheses: the 95 % interval over texts (Wilson's), each with the mean over "
        "its questions. ±: the standard error over texts. The figure's CSV file has all scores, by depth.",
    ]
    if {letter for results in found.values() for letter in results["pattern"]} == {"T"}:
        paragraphs.append(
            "Pure TSSA keeps statistics of the past instead of the tokens. It is not expected to recall an exact word, "
            "so chance level is no defect."
        )
    return "\n\n".join(paragraphs)


HEADER = ("task", "chance", "tokens", "texts", "score", "control", "exact", "gain")


def rows_of(name: str, results: Row) -> list[tuple[str, ...]]:
    """A row for each length of a task."""
    rows = []
    for cell in results["cells"]:
        key, gain = accuracy_of(cell), "gain_over_control"
        score = f"{ACCURACIES[key]} {with_interval(cell[key], cell['samples'], '.1%')}"
        shares = [f"{cell[one]:.1%}" if one in cell else "–" for one in (f"control_{key}", "exact_accuracy")]
        shown_gain = with_error(cell[gain], cell[f"{gain}_standard_error"], "+.3f") if gain in cell else "–"
        place = name, format_chance(results["chance"]), f"{cell['length']:,}", f"{cell['samples']:,}"
        rows.append((*place, score, *shares, shown_gain))
    return rows


def cells_chart(found: Mapping[str, Row]) -> Chart:
    """The accuracy of each task by length, and by depth if it has depths, with that of the control."""
    cells = [
        {"task": name, **{key: cell[key] for key in ("length", "samples")}, **own}
        for name, results in found.items() for cell in results["cells"] for own in cell.get("depths", [cell])
    ]  # fmt: skip
    lengths = sorted({cell["length"] for cell in cells})
    rows = list(dict.fromkeys((cell["task"], cell.get("depth")) for cell in cells))
    names = [task.split("@")[0] + ("" if depth is None else f", depth {depth:g}") for task, depth in rows]
    figure, panels = new_panels(4 + 1.5 * len(lengths), 1.6 + 0.4 * len(rows), 2, sharey=True)
    image: Any = None
    for axes, prefix in zip(panels, ("", "control_"), strict=True):
        percent_RL = np.full((len(rows), len(lengths)), np.nan)
        for cell in cells:
            place = rows.index((cell["task"], cell.get("depth"))), lengths.index(cell["length"])
            percent_RL[place] = 100 * cell.get(prefix + accuracy_of(cell), np.nan)
        image = draw_heatmap(axes, percent_RL, lengths, names)
        axes.set_title("control" if prefix else "score")
    figure.colorbar(image, ax=panels, label="accuracy (%)")
    header = list(dict.fromkeys(key for cell in cells for key in cell))
    return Chart(figure, header, [[cell.get(key, "") for key in header] for cell in cells])
