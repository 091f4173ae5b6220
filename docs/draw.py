"""Draw the figures of the pages from stored results and from plans.

    python docs/draw.py

- memory.png: `python -m benchmarks.long`, and the plan of the recipe qwen3_5_4b
- length.png: `python -m benchmarks.model`
- positions.png: `python -m experiments.comparison`
- traffic.png: plans of one layer, beside the formulas of other methods
- retrieval.png: results/smollm2.json, with its command

Of benchmarks, the newest result in results/benchmarks.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.comparison.__main__ import stored
from tost_lm.config import load_config, recipes
from tost_lm.inference.effective_length import accuracy_of
from tost_lm.page import draw_heatmap
from tost_lm.pretrain.plan.fit import complete, gpu_bytes
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.plan.traffic import collectives, collectives_of_replicas

CHECKOUT = Path(__file__).parents[1]
LENGTHS = [2**k for k in range(15, 23)]
RANKS = 8
LAYERS = {"A": "softmax attention", "D": "delta rule", "T": "TSSA"}
FORMS = ["olmo-hybrid", "qwen3-5", "olmo-hybrid-pre-keys", "delta", "softmax"]
COLORS = {"whole rows": "tab:orange", "tile by tile": "tab:blue"}
TASKS = {
    "training step": ("peak_bytes", "peak memory [MB]"),
    "decoding a token": ("state_bytes", "memory of the past [MB]"),
}


def newest_result(benchmark: str) -> dict[str, Any]:
    results = [json.loads(path.read_text()) for path in (CHECKOUT / "results/benchmarks").glob(f"{benchmark}_*.json")]
    return max(results, key=lambda result: result["machine"]["time"])


def draw_memory() -> Figure:
    """Memory of a training step by length, in tiles and in whole rows: measured on a CPU, and planned for GPUs."""
    result = newest_result("long")
    figure, (measured, planned) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, color in COLORS.items():
        cells = [cell for cell in result["cells"] if cell["rival"] == name and "peak_bytes" in cell]
        memory = [cell["peak_bytes"] / 1e9 for cell in cells]
        measured.plot([cell["tokens"] for cell in cells], memory, marker="o", label=name, color=color)
    ways = {"whole rows": [], "tile by tile": ["memory.tile_tokens=65536", "memory.offload_tile_states=true"]}
    for name, words in ways.items():
        plans = [_plan("qwen3_5_4b", ["stages=[]", f"train.seq_len={tokens}", *words]) for tokens in LENGTHS]
        planned.plot(LENGTHS, [gpu_bytes(plan) / 1e9 for plan in plans], "o--", label=name, color=COLORS[name])
    planned.axhline(80, color="gray", linewidth=1)
    planned.annotate("80 GB", (LENGTHS[0], 80), textcoords="offset points", xytext=(0, 4), fontsize=9)
    shape = result["settings"]["shape"]
    measured.set_title(
        f"TSSA, {shape['layers']} layers, width {shape['width']}: measured, one CPU process", fontsize=10
    )
    planned.set_title("Qwen3.5-4B: planned, each of 8 H100", fontsize=10)
    for axis in (measured, planned):
        _by_length(axis, "memory of a training step [GB]")
    _label_lengths(measured, [cell["tokens"] for cell in cells])
    _label_lengths(planned, LENGTHS[::2])
    planned.set_yticks([20, 40, 80, 160, 320])
    return figure


def draw_traffic() -> Figure:
    """What a rank sends for a layer by length: planned of ours, and by the formulas of other methods."""
    plans = {name: [_of_layer(letter, tokens) for tokens in LENGTHS] for letter, name in LAYERS.items()}
    figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    for name, of_lengths in plans.items():
        replicas = [collectives_of_replicas(plan) for plan in of_lengths]
        sent = [
            sum(one.sent_bytes for one in collectives(plan) if one not in of) / plan.micro_batches
            for plan, of in zip(of_lengths, replicas, strict=True)
        ]
        axis.plot(LENGTHS, [size / 1e6 for size in sent], marker="o", label=name)
    model = plans[LAYERS["A"]][0].model
    head, ranks, width = model.width // model.heads, RANKS, 2  # bytes in bfloat16
    channels = 2 * (model.softmax.kv_heads or model.heads) * head
    # Keys and values go around forward and backward, their gradients with the latter.
    axis.plot(
        LENGTHS, [3 * (ranks - 1) * n / ranks * channels * width / 1e6 for n in LENGTHS], "--", label="ring attention"
    )
    numbers = model.delta.value_heads or model.heads
    state = numbers * head * head * 4
    axis.plot(LENGTHS, [2 * (ranks - 1) * state / 1e6] * len(LENGTHS), "--", label="LASP-2, linear attention")
    axis.set_title(f"a layer of the recipe delta_350m on {RANKS} sequence ranks, forward and backward", fontsize=10)
    _by_length(axis, "sent by a rank for a row [MB]")
    _label_lengths(axis, LENGTHS[::2])
    return figure


def draw_positions() -> Figure:
    """The loss by position of five forms: means over seeds."""
    figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    for form in FORMS:
        found = [one["loss_by_position"] for one in stored("text") if one["form"] == form]
        ends = [int(end) for end in found[0]]
        axis.plot(ends, [fmean(one[str(end)] for one in found) for end in ends], marker="o", label=form)
    _by_length(axis, "loss [nats per token]")
    axis.set_yscale("linear")
    axis.set_ylim(top=4.0)
    axis.set_xlabel("position, end of the bin")
    _label_lengths(axis, ends)
    return figure


def draw_retrieval() -> Figure:
    """What SmolLM2-135M finds by length: needles by their depth, and the mean of each task."""
    found = json.loads((CHECKOUT / "results/smollm2.json").read_text())["results"]
    lengths = [cell["length"] for cell in found[0]["cells"]]
    needles = next(one["cells"] for one in found if one["protocol"] == "needle@keys")
    by_depth = {f"depth {own[0]['depth']:g}": own for own in zip(*(cell["depths"] for cell in needles), strict=True)}
    by_task = {one["protocol"].partition("@")[0]: one["cells"] for one in found}
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, rows, title in zip(panels, (by_depth, by_task), ("needle, by depth", "all tasks"), strict=True):
        percent_RL = np.array([[100 * cell[accuracy_of(cell)] for cell in row] for row in rows.values()])
        image = draw_heatmap(axis, percent_RL, lengths, list(rows))
        axis.set_title(title, fontsize=10)
    figure.colorbar(image, ax=panels, label="accuracy (%)")
    return figure


def _of_layer(letter: str, tokens: int) -> PlanConfig:
    layout = [f"parallel.sequence={RANKS}", "train.micro_batch_size=1", "train.global_batch_size=1", "train.steps=5000"]
    return _plan(
        "delta_350m",
        [
            *layout,
            f"model.pattern={letter}",
            "model.layers=1",
            f"model.max_positions={tokens}",
            f"train.seq_len={tokens}",
        ],
    )


def _plan(recipe: str, words: list[str]) -> PlanConfig:
    return complete(load_config(PlanConfig, recipes()[recipe], words))


def _by_length(axis: Axes, quantity: str) -> None:
    axis.loglog(base=2)
    axis.set_yscale("log", base=10)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_ylabel(quantity)
    axis.set_xlabel("tokens")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9, framealpha=0.5)


def _label_lengths(axis: Axes, lengths: Sequence[int]) -> None:
    in_units = lambda tokens: (
        f"{tokens >> 20}M" if tokens >= 2**20 else f"{tokens >> 10}k" if tokens >= 2**10 else f"{tokens}"
    )
    axis.set_xticks(lengths, list(map(in_units, lengths)))


def draw_length() -> Figure:
    result = newest_result("model")
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
        _label_lengths(axis, lengths)
        axis.set_xlabel("tokens")
    axes[0, 0].legend()
    shape = result["settings"]["shape"]
    figure.suptitle(
        f"{shape['layers']} layers, {shape['heads']} heads, width {shape['width']}; {result['machine']['device']}",
        fontsize=10,
    )
    return figure


FIGURES = {
    "memory": draw_memory,
    "length": draw_length,
    "positions": draw_positions,
    "traffic": draw_traffic,
    "retrieval": draw_retrieval,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        draw().savefig(CHECKOUT / f"docs/figures/{name}.png", dpi=120, metadata={"Software": None})
