"""Retrieval figures: heatmaps of accuracies with their numbers, on a fixed scale of 0 to 100 %."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tost_lm.evaluation.report.charts import Chart, new_figure
from tost_lm.evaluation.report.latex import tabular

NEEDLE_KEYS = {"choice_accuracy": "with the needle", "control_choice_accuracy": "control without it"}
CELL_INCHES = 0.5
LIGHT_ABOVE = 55  # light colours need black text


def needle_chart(cells: Sequence[dict[str, Any]]) -> Chart:
    """Choice accuracy by depth and length, with and without the needle."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    figure = Figure(figsize=(3 + 1.5 * len(lengths), 1.6 + CELL_INCHES * len(depths)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
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


def format_chance(chance: float) -> str:
    return f"{chance:.0%}" if chance > 0.001 else "< 0.1%"


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
