"""Figures of something by layer: lines from dark for the first to light for the last, or a panel for each of a few."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from tost_lm.evaluation.report.charts import Chart, joined

LIGHTEST = 0.85  # cividis is even in lightness, reads the same with red-green colour blindness, and ends too light
NAMED_LAYERS = 8
PANELS = 4
MOST_MARKS = 8
SHAPES = "os^DvP*X"


def layers_chart(
    x: str, xs: Sequence[float], panels: Mapping[str, Sequence[Sequence[float | None]]], *, doubling: bool
) -> Chart:
    """Panels beside each other, a line for each layer; `panels` are values [L][X] by what they are and their unit."""
    figure = Figure(figsize=(0.9 + 3.8 * len(panels), 3.6), layout="constrained")
    lines: dict[str, tuple[Sequence[float], Sequence[Any]]] = {}
    for axes, (label, found_LX) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        values_LX = np.array(found_LX, dtype=float)
        draw_layers(axes, xs, values_LX)
        if doubling:
            doubling_axis(axes)
        if (values_LX < 0).any():
            axes.axhline(0, color="0.5", linewidth=1)
        axes.set_xlabel(x)
        axes.set_ylabel(label)
        lines |= {name: (xs, line) for name, line in of_layers(found_LX, label).items()}
    name_layers(figure, len(next(iter(panels.values()))))
    return Chart(figure, **joined(x, lines))


def draw_layers(axes: Any, xs: Sequence[float], values_LX: Any) -> None:
    """A line for each layer of values [L, X]; beyond `NAMED_LAYERS` `name_layers` tells them by a scale."""
    for number, values in enumerate(values_LX, start=1):
        share = (number - 1) / max(len(values_LX) - 1, 1)
        shape = SHAPES[number - 1] if len(values_LX) <= NAMED_LAYERS else "."
        axes.plot(xs, values, color=colormaps["cividis"](LIGHTEST * share), marker=shape, markersize=4, label=number)
    axes.grid(alpha=0.3)


def name_layers(figure: Figure, layers: int) -> None:
    """Beside all panels."""
    if layers <= NAMED_LAYERS:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, title="TSSA layer", loc="outside right center")
    else:
        scale = ScalarMappable(Normalize(1, 1 + (layers - 1) / LIGHTEST), "cividis")
        bar = figure.colorbar(scale, ax=figure.axes, label="TSSA layer")
        bar.ax.set_ylim(1, layers)


def doubling_axis(axes: Any) -> None:
    """Stretches of tokens that double in length, up to each mark."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def number_ticks(axis: Any, count: int, first: int) -> None:
    """Marks 1 to `count` on an axis on which the first is at `first`; fewer where they would touch."""
    places = range(0, count, -(-count // MOST_MARKS))
    axis.set_ticks([first + place for place in places], [str(place + 1) for place in places])


def of_layers(values_LX: Sequence[Sequence[Any]], name: str) -> dict[str, Sequence[Any]]:
    """A column for each layer."""
    return {f"{name}, TSSA layer {number}": values for number, values in enumerate(values_LX, start=1)}


def some_layers(layers: int) -> list[int]:
    """The first, the last, and those evenly between, from 0 on; `PANELS` at most."""
    return np.unique(np.linspace(0, layers - 1, PANELS).round().astype(int)).tolist()
