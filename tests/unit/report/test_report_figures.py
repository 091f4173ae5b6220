"""Figures of reports: texts lie inside the figure, and tick labels do not overlap."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, starmap
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from stage_records import progress

from tost_lm.page import Chart
from tost_lm.report.record import Curve, position_curves_chart, step_chart
from tost_lm.report.training import loss_chart, optimizer_chart, position_chart
from tost_lm.tasks.needle import needle_chart
from tost_lm.tasks.positions import extrapolation_chart
from tost_lm.tasks.ruler import tasks_chart

ENDS = [8 * 2**i for i in range(14)]
FALLING = np.geomspace(9, 3, len(ENDS)).tolist()


def needle(depths: int, lengths: int) -> Chart:
    return needle_chart([
        {"length": 1024 * 2**i, "depth": d / max(depths - 1, 1), "choice_accuracy": 1.0, "control_choice_accuracy": 0.1}
        for i in range(lengths) for d in range(depths)
    ])  # fmt: skip


def tasks(count: int, lengths: int) -> Chart:
    keys = ("found_share", "control_found_share", "exact_accuracy", "control_exact_accuracy", "answer_nats")
    cell = dict.fromkeys([*keys, "control_answer_nats"], 0.5)
    cells = [{"length": 1024 * 2**i, **cell} for i in range(lengths)]
    return tasks_chart({f"niah_multiquery_{i}@own-words": {"chance": 0.1, "cells": cells} for i in range(count)})


def training(steps: Sequence[int]) -> Iterator[Chart]:
    metrics = [{"step": step, "loss": 9 / (1 + i), "lr": 1e-4, "grad_norm": 0.5 + i} for i, step in enumerate(steps)]
    measured = [{"step": step, "loss": 5, "position_ends": ENDS, "loss_by_position": FALLING} for step in steps[:9]]
    stages = [replace(progress(steps[-1], 1, 4).stages[0], first_step=step) for step in (0, steps[len(steps) // 2])]
    yield loss_chart(metrics, measured, stages)
    yield optimizer_chart(metrics, stages)
    yield position_chart(measured)
    curve = Curve(list(steps), np.linspace(9, 3, len(steps)), np.full(len(steps), 0.1))
    yield step_chart({f"{i}: {'optim.lr=0.001 ' * 4}"[:60]: curve for i in range(3)}, "validation loss")
    yield position_curves_chart({"1: model.pattern=T, step 600,000": Curve(ENDS, np.array(FALLING), None)})


def extrapolation() -> Iterator[Chart]:
    positions = zip(ENDS, FALLING, strict=True)
    extrapolated = [
        {"end": end, "nats_per_token": nats, "standard_error": 0.1, "trained": end <= 1024} for end, nats in positions
    ]
    yield extrapolation_chart(extrapolated, 1024)
    yield extrapolation_chart(extrapolated[:8], 1024)


CHARTS: dict[str, Callable[[], Iterable[Chart]]] = {
    "needle": lambda: starmap(needle, ((1, 1), (2, 3), (5, 3), (11, 6))),
    "tasks": lambda: starmap(tasks, ((1, 1), (9, 6))),
    **{f"{len(x)} steps": partial(training, x) for x in ([1], range(3), range(10, 161, 10), range(0, 600_001, 1000))},
    "positions": extrapolation,
}


def tick_labels(axis: Any) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    labels = [label for tick in ticks for label in (tick.label1, tick.label2)]
    return [label for label in labels if label.get_visible() and label.get_text()]


def texts(figure: Figure, axes: Axes) -> Iterator[Text]:
    yield from (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
    yield from (*tick_labels(axes.xaxis), *tick_labels(axes.yaxis))
    for legend in (axes.get_legend(), *figure.legends):
        yield from legend.get_texts() if legend else ()


@pytest.mark.parametrize("charts", CHARTS.values(), ids=CHARTS)
def test_texts_are_inside_and_tick_labels_apart(charts: Callable[[], Iterable[Chart]]):
    for chart in charts():
        figure = chart.drawing
        canvas = FigureCanvasAgg(figure)
        figure.draw_without_rendering()
        extent = lambda text, canvas=canvas: text.get_window_extent(canvas.get_renderer())
        for axes in figure.axes:
            for text in filter(Text.get_text, texts(figure, axes)):
                assert (extent(text).min >= 0).all(), text
                assert (extent(text).max <= figure.bbox.max).all(), text
            for axis, side in ((axes.xaxis, 0), (axes.yaxis, 1)):
                boxes = sorted((extent(label) for label in tick_labels(axis)), key=lambda box: box.min[side])
                assert all(first.max[side] <= second.min[side] for first, second in pairwise(boxes)), axis
