"""The section of a run's report about which tokens the heads of its TSSA layers take."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from tost_lm.evaluation.report.analysis.layers import SHAPES, number_ticks, some_layers
from tost_lm.evaluation.report.charts import Chart, joined
from tost_lm.evaluation.report.curves import CONTRAST, DARK
from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import of_checkpoint
from tost_lm.evaluation.report.record import Evaluated
from tost_lm.evaluation.subject import TOKENS

COLOURS = (DARK, CONTRAST, "0.55")
SHOWN = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})
WORDS_IN_TABLE = 5


def tokens(run: Evaluated, page: Page) -> str:
    """What explains the memberships, and the words of each head; empty without results."""
    results = run.results(TOKENS)
    if results is None:
        return ""
    layers: list[list[dict[str, Any]]] = results["layers"]
    rows = [
        (f"{layer + 1}", f"{head + 1}", *[_words(layers[layer][head][end]) for end in ("most", "least")])
        for layer in some_layers(len(layers))
        for head in range(len(layers[layer]))
    ]
    return "\n\n".join([
        f"## Tokens of the heads ({escape(TOKENS)})",
        of_checkpoint(run, results, f"eval.analyze {run.with_text}"),
        page.show("explained", explained_chart(results["explained"]), "What explains memberships at a position"),
        "The share of the variance that memberships have at a position which the word explains, its class, and the "
        "document, early and late positions alike; labels drawn by lot explain 0.",
        page.show("word_classes", classes_chart(results), "Memberships of word classes by head"),
        "Of each head the words of which it takes most beside others at their positions, and least, in standard "
        "deviations of its memberships at a position, ± the standard error of as many tokens drawn by lot: of words "
        f"that are {results['least_errors']:g} such errors off at least and have {results['least_tokens']} tokens or "
        f"more (␣ is a space, ↵ a line break). All layers are in `eval/{TOKENS}/results.json`; a text coloured by head "
        f"is in [text.html](eval/{TOKENS}/text.html).",
        table(("TSSA layer", "head", "most", "least"), rows),
    ])  # fmt: skip


def explained_chart(explained: Mapping[str, Sequence[float | None]]) -> Chart:
    """Shares by layer, a line for each thing that may explain the memberships."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.add_subplot()
    percents = {name: 100 * np.array(shares, dtype=float) for name, shares in explained.items()}
    numbers = np.arange(1, 1 + len(next(iter(percents.values()))))
    for (name, percent), colour, shape in zip(percents.items(), COLOURS, SHAPES, strict=False):
        axes.plot(numbers, percent, color=colour, marker=shape, label=name)
    number_ticks(axes.xaxis, len(numbers), 1)
    axes.set_xlabel("TSSA layer")
    axes.set_ylabel("variance explained (%)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    lines = {f"explained by {name} (%)": (numbers.tolist(), percent.tolist()) for name, percent in percents.items()}
    return Chart(figure, **joined("TSSA layer", lines))


def classes_chart(results: Mapping[str, Any]) -> Chart:
    """The mean surplus of each word class in each head, of a few layers."""
    surplus_LCH = np.array(results["word_class_surplus"])
    chosen = some_layers(len(surplus_LCH))
    names = [
        f"{name} ({count:,})"
        for name, count in zip(results["word_classes"], results["word_class_tokens"], strict=True)
    ]  # fmt: skip
    largest = max(float(np.abs(surplus_LCH[chosen]).max()), 1e-9)
    figure = Figure(figsize=(2.6 + 1.7 * len(chosen), 0.9 + 0.3 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(chosen), squeeze=False, sharey=True)[0]
    image: Any = None
    for axes, number in zip(panels, chosen, strict=True):
        # PuOr reads the same with red-green colour blindness, and is white in its middle.
        image = axes.imshow(
            surplus_LCH[number], cmap="PuOr", norm=TwoSlopeNorm(0, -largest, largest), aspect="auto"
        )  # fmt: skip
        number_ticks(axes.xaxis, surplus_LCH.shape[2], 0)
        axes.set_xlabel("head")
        axes.set_title(f"TSSA layer {number + 1}", fontsize=10)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    figure.colorbar(image, ax=panels, label="beside the mean at the position\n(standard deviations)")
    rows = [
        [layer, name, head, value]
        for layer, surplus_CH in enumerate(surplus_LCH.tolist(), start=1)
        for name, values in zip(results["word_classes"], surplus_CH, strict=True)
        for head, value in enumerate(values, start=1)
    ]
    return Chart(figure, ["TSSA layer", "word class", "head", "membership beside the mean (standard deviations)"], rows)


def shown(text: str) -> str:
    """A token's text with its white space to be seen."""
    return text.translate(SHOWN) or "end of text"


def _words(words: Sequence[Mapping[str, Any]]) -> str:
    told = (
        f"“{shown(word['text'])}” {word['surplus']:+.1f} ± {word['tokens'] ** -0.5:.1f}"
        for word in words[:WORDS_IN_TABLE]
    )
    return " · ".join(told) or "–"
