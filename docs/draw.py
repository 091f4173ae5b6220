"""Draw the figure of a stored result: length.png of `python -m benchmarks.model`, the newest in results/benchmarks.

python docs/draw.py
"""

import json
import math
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

CHECKOUT = Path(__file__).parents[1]
TASKS = {
    "training step": ("peak_bytes", "peak memory [MB]"),
    "decoding a token": ("state_bytes", "memory of the past [MB]"),
}


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


if __name__ == "__main__":
    draw_length().savefig(CHECKOUT / "docs/figures/length.png", dpi=120, metadata={"Software": None})
