"""The report's pictures as PNG bytes."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def loss_picture(metrics: Sequence[dict[str, Any]]) -> bytes:
    """Training loss by step: as logged, and its running mean."""
    steps = [row["step"] for row in metrics]
    losses = [row["loss"] for row in metrics]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#8fb4d9", linewidth=1.2, marker=".", markersize=4, label="as logged")
    axes.plot(steps, _smoothed(losses), color="#0b3c6f", linewidth=2, label="smoothed")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("training loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return _png(figure)


def needle_picture(cells: Sequence[dict[str, Any]]) -> bytes:
    """Choice accuracy by depth and length on a fixed scale of 0 to 100 %, beside the control without the needle."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    figure = Figure(figsize=(3 + 1.5 * len(lengths), 1.6 + 0.5 * len(depths)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    image = None
    for axes, key, title in zip(
        panels, ("choice_accuracy", "control_choice_accuracy"), ("with the needle", "control: no needle"), strict=True
    ):
        percent = np.full((len(depths), len(lengths)), np.nan)
        for cell in cells:
            percent[depths.index(cell["depth"]), lengths.index(cell["length"])] = 100 * cell[key]
        # cividis is even in lightness and reads the same with red-green colour blindness
        image = axes.imshow(percent, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        for (row, column), value in np.ndenumerate(percent):
            colour = "black" if value > 55 else "white"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        axes.set_xlabel("length (tokens)")
        axes.set_title(title)
    panels[0].set_ylabel("depth of the needle (0: beginning)")
    assert image is not None
    figure.colorbar(image, ax=panels, label="right word chosen (%)")
    return _png(figure)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean of up to a tenth of all values around each; fewer towards the ends, so that the curve does not lag."""
    reach = max(1, len(values) // 20)
    averages = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        averages.append(sum(values[i - near : i + near + 1]) / (2 * near + 1))
    return averages


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130, metadata={"Software": None})
    return file.getvalue()
