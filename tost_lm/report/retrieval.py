"""Report sections and figures of retrieval: needle grid and tasks of a run, and all tasks by group of runs; and of the
use of context: a table for each task, and what the context is worth by length.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tost_lm.checkpointing.format import read_model_config
from tost_lm.inference.protocol_names import (
    CONTEXT_FACTS,
    CONTEXT_GAIN,
    CONTEXT_TASKS,
    COPYING,
    NEEDLE,
    OWN_WORDS,
    RETRIEVAL_TASKS,
)
from tost_lm.markdown import escape, format_chance, table, with_error
from tost_lm.mixers.facts import Load
from tost_lm.model.config import ModelConfig
from tost_lm.report.page import Chart, Page, new_figure, new_panels, position_axis, tabular
from tost_lm.report.protocols import checkpoint_line, missing_line
from tost_lm.report.record import EvaluatedModel, Group, Mean

HEADLINES = dict.fromkeys(RETRIEVAL_TASKS, "found_share") | {NEEDLE: "choice_accuracy"}
"""The headline score of each task."""


def needle(run: EvaluatedModel, page: Page) -> str:
    """The needle grid with its control."""
    results = run.results(NEEDLE)
    if results is None:
        others = any(run.results(name) for name in OWN_WORDS)
        return "" if others else f"## Needle in a haystack\n\n{missing_line('tost eval retrieval', run.arguments)}"
    cells = results["cells"]
    examples = sum(cell["samples"] for cell in cells)
    scores = ("choice_accuracy", "control_choice_accuracy", "exact_accuracy")
    model, rows = read_model_config(run.subject.checkpoint), []
    for length in sorted({cell["length"] for cell in cells}):
        own = [cell for cell in cells if cell["length"] == length]
        means = [f"{mean_score(own, key):.1%}" for key in scores]
        rows.append((f"{length:,}", *means, f"{decoding_bytes(model, length) / 1000:,.1f}"))
    paragraphs = [
        f"## Needle in a haystack ({escape(NEEDLE)})",
        checkpoint_line(run, results, f"tost eval retrieval {run.arguments}"),
        page.add_figure("needle", needle_chart(cells), "Accuracy by needle depth and length, with control"),
        table(("tokens", "choice accuracy", "control without the needle", "exact accuracy", "state (kB)"), rows),
        "Choice accuracy: the right word is the most likely of ten. Exact accuracy: each of its tokens is the most "
        "likely token. State: what decoding keeps of these tokens, for each sequence in float32. "
        f"Chance level of the choice: {results['chance']:.0%}. Each cell has {cells[0]['samples']} "
        f"examples, the grid {examples}. At chance level the standard error of a cell is "
        f"{_chance_error(results['chance'], cells[0]['samples']):.0%} and that of the mean "
        f"{_chance_error(results['chance'], examples):.1%}.",
    ]
    if set(results["pattern"]) == {"T"}:
        paragraphs.append(
            "Pure TSSA keeps statistics of the past instead of the tokens. It is not expected to recall an exact word, "
            "so chance level is no defect."
        )
    return "\n\n".join(paragraphs)


def decoding_bytes(model: ModelConfig, tokens: int) -> float:
    """Bytes of the state of all layers after so many tokens of a document, in float32."""
    micro_batch = 4, True, tokens, tokens, tokens, 1, 1, 1
    of_layer = {facts: facts.state_bytes(Load(shape, *micro_batch)) for facts, shape in model.mixers}
    return sum(facts.layers(model.letters) * size for facts, size in of_layer.items())


def tasks(run: EvaluatedModel, page: Page) -> str:
    """Tasks with the structure of RULER by length; empty without results."""
    found = {name: results for name in OWN_WORDS if (results := run.results(name))}
    if not found:
        return ""
    samples = sorted({cell["samples"] for results in found.values() for cell in results["cells"]})
    return "\n\n".join([
        "## Retrieval tasks",
        *_of_checkpoints(run, found),
        page.add_figure("retrieval", tasks_chart(found), "Recall by task and length"),
        "Recall is the fraction of the expected values in the model's greedy answer. The control in parentheses uses a "
        "text without the values. Chance is the score of a random answer of the right form. Examples in a cell: "
        f"{' to '.join(f'{count:,}' for count in dict.fromkeys([samples[0], samples[-1]]))}. The standard error of a "
        f"recall is at most {0.5 / samples[0] ** 0.5:.1%}.",
        _by_length(found, lambda cell: f"{cell['found_share']:.1%} ({cell['control_found_share']:.1%})"),
        "Exact accuracy (each answer token is the most likely one after the earlier ones), then −log p of the answer "
        "in nats: with the values / control.",
        _by_length(
            found,
            lambda cell: f"{cell['exact_accuracy']:.1%}, {cell['answer_nats']:.2f} / {cell['control_answer_nats']:.2f}",
        ),
    ])  # fmt: skip


def of_groups(groups: Sequence[Group]) -> str:
    """Every task and length with a column for each group; empty unless several runs have results."""
    runs = [run for group in groups for run in group.runs]
    if sum(any(run.results(name) for name in RETRIEVAL_TASKS) for run in runs) < 2:
        return ""
    rows = []
    for name in RETRIEVAL_TASKS:
        results = [group.results(name) for group in groups]
        chances = [result["chance"] for found in results for result in found]
        lengths = sorted({cell["length"] for found in results for result in found for cell in result["cells"]})
        rows += [
            (name, f"{length:,}", format_chance(chances[0]), *[_mean_of(found, name, length) for found in results])
            for length in lengths
        ]
    return "\n\n".join([
        "## Retrieval",
        f"Recall of the expected values (for {escape(NEEDLE)}: choice accuracy), mean ± standard error over the runs "
        "of a group. The control in parentheses uses a text without the values.",
        table(("task", "tokens", "chance", *[f"group {group.number}" for group in groups]), rows),
    ])  # fmt: skip


def mean_score(cells: Sequence[dict[str, Any]], key: str) -> float:
    """Mean over all examples of the cells."""
    return sum(cell[key] * cell["samples"] for cell in cells) / sum(cell["samples"] for cell in cells)


def _of_checkpoints(run: EvaluatedModel, found: Mapping[str, dict[str, Any]]) -> list[str]:
    """A line for each evaluated checkpoint, with its tasks if there are several checkpoints."""
    names: dict[str, list[str]] = {}
    for name, results in found.items():
        names.setdefault(results["identity"]["checkpoint_sha256"], []).append(name)
    lines = []
    for own in names.values():
        seconds = sum(found[name]["seconds"] for name in own)
        tasks = ", ".join(f'"{name}"' for name in own)
        command = f"tost eval retrieval {run.arguments} 'retrieval.tasks=[{tasks}]'"
        line = checkpoint_line(run, found[own[0]] | {"seconds": seconds}, command)
        lines.append(f"{escape(', '.join(own))}: {line}" if len(names) > 1 else line)
    return lines


def _by_length(found: Mapping[str, dict[str, Any]], shown: Callable[[dict[str, Any]], str]) -> str:
    lengths = sorted({cell["length"] for results in found.values() for cell in results["cells"]})
    rows = []
    for name, results in found.items():
        cells = {cell["length"]: shown(cell) for cell in results["cells"]}
        rows.append((name, format_chance(results["chance"]), *[cells.get(length, "–") for length in lengths]))
    return table(("task", "chance", *[f"{length:,} tokens" for length in lengths]), rows)


def _mean_of(found: Sequence[dict[str, Any]], name: str, length: int) -> str:
    """Mean over runs; over all depths if there are several."""
    cells = [own for results in found if (own := [cell for cell in results["cells"] if cell["length"] == length])]
    mean = Mean.of([mean_score(own, HEADLINES[name]) for own in cells])
    control = Mean.of([mean_score(own, f"control_{HEADLINES[name]}") for own in cells])
    if mean is None or control is None:
        return "–"
    return f"{with_error(mean.value, mean.error, '.1%')} ({control.value:.1%})"


def _chance_error(chance: float, examples: int) -> float:
    return (chance * (1 - chance) / examples) ** 0.5


NEEDLE_KEYS = {"choice_accuracy": "with the needle", "control_choice_accuracy": "control without it"}
CELL_INCHES = 0.5
LIGHT_ABOVE = 55  # light colours need black text


def needle_chart(cells: Sequence[dict[str, Any]]) -> Chart:
    """Choice accuracy by depth and length, with and without the needle."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    size = 3 + 1.5 * len(lengths), 1.6 + CELL_INCHES * len(depths)
    figure, panels = new_panels(*size, len(NEEDLE_KEYS), sharey=True)
    percents: list[np.ndarray] = []
    image: Any = None
    for axes, (key, title) in zip(panels, NEEDLE_KEYS.items(), strict=True):
        percent_DL = np.full((len(depths), len(lengths)), np.nan)
        for cell in cells:
            percent_DL[depths.index(cell["depth"]), lengths.index(cell["length"])] = 100 * cell[key]
        percents.append(percent_DL)
        image = _draw_heatmap(axes, percent_DL, lengths, [f"{depth:g}" for depth in depths])
        axes.set_title(title)
    panels[0].set_ylabel("needle depth (0–1)")
    figure.colorbar(image, ax=panels, label="accuracy (%)")
    header = [
        "length (tokens)",
        "depth (fraction of the text)",
        *[f"choice accuracy, {name} (%)" for name in NEEDLE_KEYS.values()],
    ]
    rows = [[c["length"], c["depth"], *[100 * c[key] for key in NEEDLE_KEYS]] for c in cells]
    table = [
        (f"{depth:g}", *[f"{_percent(a)} ({_percent(b)})" for a, b in zip(*both, strict=True)])
        for depth, *both in zip(depths, *percents, strict=True)
    ]
    latex = tabular(("depth", *[f"{length:,} tokens" for length in lengths]), table)
    return Chart(figure, header, rows, latex)


def tasks_chart(found: Mapping[str, dict[str, Any]]) -> Chart:
    """Recall of the answers by task and length; `found` are results by task.

    The LaTeX table also has the chance level and, in parentheses, the control.
    """
    lengths = sorted({cell["length"] for results in found.values() for cell in results["cells"]})
    percent_NL = np.full((len(found), len(lengths)), np.nan)
    table = []
    for row, (name, results) in zip(percent_NL, found.items(), strict=True):
        texts = dict.fromkeys(lengths, "–")
        for cell in results["cells"]:
            row[lengths.index(cell["length"])] = 100 * cell["found_share"]
            texts[cell["length"]] = f"{cell['found_share']:.1%} ({cell['control_found_share']:.1%})"
        table.append((name, format_chance(results["chance"]), *texts.values()))
    names = [name.split("@")[0] for name in found]
    figure, axes = new_figure(3.6 + 0.9 * len(lengths), 1.4 + 0.4 * len(names))
    figure.colorbar(_draw_heatmap(axes, percent_NL, lengths, names), ax=axes, label="recall (%)")
    keys = ("found_share", "exact_accuracy")
    header = [
        "task", "length (tokens)", "recall (%)", "recall, control (%)", "exact (%)", "exact, control (%)",
        "answer (nats)", "answer, control (nats)", "chance (%)",
    ]  # fmt: skip
    rows = [
        [
            name, cell["length"], *[100 * cell[prefix + key] for key in keys for prefix in ("", "control_")],
            cell["answer_nats"], cell["control_answer_nats"], 100 * results["chance"],
        ]
        for name, results in found.items() for cell in results["cells"]
    ]  # fmt: skip
    latex = tabular(("task", "chance", *[f"{length:,} tokens" for length in lengths]), table)
    return Chart(figure, header, rows, latex)


def _draw_heatmap(axes: Any, percent_RL: np.ndarray, lengths: Sequence[int], names: Sequence[str]) -> Any:
    """Rows by length; NaN stays white. Returns the image for its colour bar."""
    # cividis has even lightness and is safe for red-green colour blindness.
    image = axes.imshow(percent_RL, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for (row, i), value in np.ndenumerate(percent_RL):
        if np.isfinite(value):
            colour = "black" if value > LIGHT_ABOVE else "white"
            axes.text(i, row, f"{value:.0f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("length (tokens)")
    return image


def _percent(value: float) -> str:
    return f"{value:.1f}%" if np.isfinite(value) else "–"


COLUMNS = {
    "choice_accuracy": "choice",
    "found_share": "found",
    "token_accuracy": "tokens",
    "nats_per_token": "nats per token",
}
SHOWN: dict[str, tuple[str, ...]] = dict.fromkeys(CONTEXT_TASKS, ("choice_accuracy", "found_share", "nats_per_token"))
SHOWN |= dict.fromkeys((COPYING, CONTEXT_GAIN), ("token_accuracy", "nats_per_token"))


def context(run: EvaluatedModel, page: Page) -> str:
    """Copying, gain per token, many-shot mapping and answers from passages; empty without results."""
    found = {name: results for name in CONTEXT_TASKS if (results := run.results(name))}
    if not found:
        return ""
    paragraphs = [
        "## Use of context",
        page.add_figure("context", gain_chart(found), "Gain per token from context by length"),
        "Gain: nats per token by which the useful context lowers the answer, against the control in the figure. ± is "
        "the standard error over the examples, for gains of paired differences. Parentheses have the control. Tokens: "
        "fraction of answer tokens that are the most likely ones. Choice: the right answer is the likeliest of all. "
        "Found: it is in the greedily generated text. The figure's CSV file has these scores.",
    ]
    for name, results in found.items():
        command = f"tost eval context {run.arguments} 'context.tasks=[\"{name}\"]'"
        chance = format_chance(results["chance"])
        paragraphs += [f"### {escape(name)} (chance {chance})", checkpoint_line(run, results, command)]
        paragraphs.append(_table(name, results["cells"]))
    return "\n\n".join(paragraphs)


def gain_chart(found: Mapping[str, dict[str, Any]]) -> Chart:
    """The gain from the useful context by length, a line for each task; rows have the scores of all cells."""
    figure, axes = new_figure(7, 3.6)
    rows = []
    for name, results in found.items():
        cells, key = results["cells"], "gain_over_control"
        lengths, gains = [cell["length"] for cell in cells], [cell[key] for cell in cells]
        errors = [cell[f"{key}_standard_error"] or 0 for cell in cells]
        axes.errorbar(lengths, gains, errors, marker=".", capsize=2, label=name.split("@")[0])
        rows += [
            [name, cell["length"], cell["samples"], cell[key], cell[f"{key}_standard_error"]]
            + [cell.get(prefix + column, "") for column in COLUMNS for prefix in ("", "control_")]
            for cell in cells
        ]
    axes.axhline(0, color="black", linewidth=0.8)
    position_axis(axes, "length (tokens)")
    axes.set_ylabel("gain (nats per token)")
    axes.legend()
    header = ["task", "length (tokens)", "examples", "gain (nats/token)", "standard error (nats/token)"]
    header += [f"{name}{control}" for name in COLUMNS for control in ("", ", control")]
    return Chart(figure, header, rows)


def _table(name: str, cells: list[dict[str, Any]]) -> str:
    facts = [key for key in CONTEXT_FACTS if key in cells[0]]
    scores = [key for key in SHOWN[name] if key in cells[0]]
    gains = [key for key in cells[0] if key.startswith("gain_over_") and not key.endswith("_error")]

    def score(cell: dict[str, Any], key: str) -> str:
        form = ".3f" if key == "nats_per_token" else ".1%"
        return f"{with_error(cell[key], cell[f'{key}_standard_error'], form)} ({cell[f'control_{key}']:{form}})"

    header = (
        "length",
        *facts,
        "examples",
        *[COLUMNS[key] for key in scores],
        *[key.replace("_", " ") for key in gains],
    )
    rows = [
        (
            f"{cell['length']:,}", *[f"{cell[key]:,}" for key in facts], f"{cell['samples']:,}",
            *[score(cell, key) for key in scores],
            *[with_error(cell[key], cell[f"{key}_standard_error"], "+.3f") for key in gains],
        )
        for cell in cells
    ]  # fmt: skip
    return table(header, rows)
