"""Draw the figures of stored results: length.png of `python -m benchmarks.model`, the newest in results/benchmarks, and
recall.png of `python -m experiments.needle_lengths`.

    python docs/draw.py
"""

import json
import math
from pathlib import Path
from statistics import fmean, median

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

CHECKOUT = Path(__file__).parents[1]
TASKS = {
    "training step": ("peak_bytes", "peak memory [MB]"),
    "decoding a token": ("state_bytes", "memory of the past [MB]"),
}
FORMS = {
    "delta": "gated delta rule + softmax",
    "delta-alone": "gated delta rule",
    "tssa": "TSSA + softmax",
    "softmax": "softmax, rotary",
}
TEXTS = {"heldout": "text of the trained kind", "books": "books"}


def newest_result() -> dict:
    results = [json.loads(path.read_text()) for path in (CHECKOUT / "results/benchmarks").glob("model_*.json")]
    return max(results, key=lambda result: result["machine"]["time"])


def draw_length() -> Figure:
    result = newest_result()
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), sharex=True, layout="constrained")
    for row, (task, (memory, memory_label)) in zip(axes, TASKS.items(), strict=True):
        for rival in dict.fromkeys(cell["rival"] for cell in result["cells"]):
            cells = [
                cell for cell in result["cells"] if (cell["work"], cell["rival"]) == (task, rival) and "seconds" in cell
            ]
            lengths = [cell["tokens"] for cell in cells]
            tokens = lengths if task == "training step" else [1] * len(cells)
            times = [1e6 * median(cell["seconds"]) / count for cell, count in zip(cells, tokens, strict=True)]
            row[0].plot(lengths, times, marker="o", label=rival)
            row[1].plot(lengths, [cell[memory] / 1e6 for cell in cells], marker="o", label=rival)
        row[0].set_title(f"{task}: time", fontsize=10)
        row[1].set_title(f"{task}: memory", fontsize=10)
        row[0].set_ylabel("time per token [µs]")
        row[1].set_ylabel(memory_label)
    for axis in axes.flat:
        axis.loglog(base=2)
        low, high = axis.get_ylim()
        axis.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
        axis.set_yscale("log", base=10)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
    lengths = result["settings"]["bench"]["lengths"]
    for axis in axes[1]:
        axis.set_xticks(
            lengths, [f"{length // 1024:,}k" if length < 2**20 else f"{length >> 20}M" for length in lengths]
        )
        axis.set_xlabel("tokens")
    axes[0, 0].legend()
    shape = result["settings"]["shape"]
    figure.suptitle(
        f"{shape['layers']} layers, {shape['heads']} heads, width {shape['width']}; {result['machine']['device']}",
        fontsize=10,
    )
    return figure


def draw_recall() -> Figure:
    """Lines: means over seeds; areas: from the lowest to the highest seed."""
    results = [json.loads(path.read_text()) for path in (CHECKOUT / "results/needle_lengths").glob("*.json")]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.9), sharey=True, layout="constrained")
    lengths = sorted({cell["length"] for result in results for text in TEXTS for cell in result[text]})
    for axis, (text, title) in zip(axes, TEXTS.items(), strict=True):
        for form, label in FORMS.items():
            runs = [_accuracies(result[text]) for result in results if result["form"] == form]
            columns = [[100 * run[length] for run in runs] for length in lengths]
            (line,) = axis.plot(lengths, list(map(fmean, columns)), marker="o", label=label)
            axis.fill_between(
                lengths, list(map(min, columns)), list(map(max, columns)), alpha=0.15, color=line.get_color()
            )
        axis.axhline(10, color="grey", linestyle=":", label="chance")
        axis.axvline(256, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.set_title(f"needle in {title}", fontsize=10)
        axis.set_xlabel("tokens; trained on 256")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("the right word of ten [%]")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def _accuracies(cells: list[dict]) -> dict[int, float]:
    """By length, over all depths, which have equally many examples."""
    return {
        length: fmean(cell["choice_accuracy"] for cell in cells if cell["length"] == length)
        for length in {cell["length"] for cell in cells}
    }


if __name__ == "__main__":
    for name, draw in {"length": draw_length, "recall": draw_recall}.items():
        draw().savefig(CHECKOUT / f"docs/figures/{name}.png", dpi=120, metadata={"Software": None})
