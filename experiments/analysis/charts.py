"""Figures by TSSA layer: a line for each layer, from dark for the first to light for the last, or one panel each."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tost_lm.page import Chart, line_data, new_panels, position_axis, shade, step_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIGHTEST = 0.85  # of cividis, which has even lightness and is safe for red-green colour blindness
SHAPES = "os^DvP*X"
NAMED_LAYERS = 8
MAX_TICKS = 8


def layers_chart(
    x: str, xs: Sequence[float], panels: Mapping[str, Sequence[Sequence[float | None]]], *, steps: bool = False
) -> Chart:
    """Panels side by side with a line for each layer; `panels` are values [L][X] by axis label.

    The xs are training steps, or the ends of bins whose lengths double.
    """
    figure, grid = new_panels(0.9 + 3.0 * len(panels), 3.2, len(panels))
    lines: dict[str, tuple[Sequence[float], Sequence[Any]]] = {}
    for axes, (label, found_LX) in zip(grid, panels.items(), strict=True):
        values_LX = np.array(found_LX, dtype=float)
        draw_layers(axes, xs, values_LX)
        if steps:
            step_axis(axes, intervals=3)
        else:
            position_axis(axes, x)
        if (values_LX < 0).any():
            axes.axhline(0, color="0.5", linewidth=1)
        axes.set_ylabel(label)
        lines |= {name: (xs, line) for name, line in layer_columns(found_LX, label).items()}
    add_layer_legend(figure, len(next(iter(panels.values()))))
    return Chart(figure, **line_data(x, lines))


def draw_layers(axes: Any, xs: Sequence[float], values_LX: Any) -> None:
    """A line for each layer of values [L, X]."""
    for number, values in enumerate(values_LX, start=1):
        fraction = (number - 1) / max(len(values_LX) - 1, 1)
        shape = SHAPES[number - 1] if len(values_LX) <= NAMED_LAYERS else "."
        axes.plot(xs, values, color=shade(LIGHTEST * fraction), marker=shape, markersize=4, label=number)


def add_layer_legend(figure: "Figure", layers: int) -> None:
    """A legend, or a colour bar for more than `NAMED_LAYERS` layers."""
    if layers <= NAMED_LAYERS:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, title="TSSA layer", loc="outside right center")
    else:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        scale = ScalarMappable(Normalize(1, 1 + (layers - 1) / LIGHTEST), "cividis")
        bar = figure.colorbar(scale, ax=figure.axes, label="TSSA layer")
        bar.ax.set_ylim(1, layers)


def number_ticks(axis: Any, count: int, first: int) -> None:
    """Ticks labelled 1 to `count` on an axis where 1 is at `first`; at most `MAX_TICKS` of them."""
    indices = range(0, count, -(-count // MAX_TICKS))
    axis.set_ticks([first + index for index in indices], [str(index + 1) for index in indices])


def layer_columns(values_LX: Sequence[Sequence[Any]], name: str) -> dict[str, Sequence[Any]]:
    """A column for each layer."""
    return {f"{name}, TSSA layer {number}": values for number, values in enumerate(values_LX, start=1)}
