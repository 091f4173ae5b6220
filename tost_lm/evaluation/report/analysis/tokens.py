"""Report section: token preferences of the heads."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from tost_lm.evaluation.report.analysis.layers import SHAPES, number_ticks, select_layers
from tost_lm.evaluation.report.analysis.section import analysis_section
from tost_lm.evaluation.report.charts import Chart, line_data, new_figure
from tost_lm.evaluation.report.curves import CONTRAST, DARK
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.subject import TOKENS
from tost_lm.markdown import table, with_error

COLOURS = (DARK, CONTRAST, "0.55")
VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})
WORDS_IN_TABLE = 5


@analysis_section("Token preferences of the heads", TOKENS)
def tokens(results: dict[str, Any], page: Page) -> list[str]:
    """What explains the memberships, and typical tokens of each head."""
    layers: list[list[dict[str, Any]]] = results["layers"]
    rows = [
        (f"{layer + 1}", f"{head + 1}", *[_words(layers[layer][head][end]) for end in ("most", "least")])
        for layer in select_layers(len(layers))
        for head in range(len(layers[layer]))
    ]
    return [
        page.add_figure("explained", explained_chart(results["explained"]), "Explained variance of the memberships"),
        "Fraction of the memberships' variance at a position that the word (token id), its class and the document "
        "explain. Random labels explain 0.",
        page.add_figure("word_classes", classes_chart(results), "Surplus of word classes by head"),
        "The surplus of a token is its membership minus the mean at that position, in standard deviations. The table "
        "lists the words with the highest and lowest surplus; ± is the standard error of as many random tokens. Each "
        f"word has at least {results['least_tokens']} tokens and is at least {results['least_errors']:g} standard "
        f"errors from 0. ␣ is a space and ↵ a line break. `eval/{TOKENS}/results.json` has all layers; "
        f"[text.html](eval/{TOKENS}/text.html) is a text coloured by head.",
        table(("TSSA layer", "head", "highest surplus", "lowest surplus"), rows),
    ]


def explained_chart(explained: Mapping[str, Sequence[float | None]]) -> Chart:
    """Explained variance by layer, a line for each labelling."""
    figure, axes = new_figure(7, 3.4)
    percents = {name: 100 * np.array(fractions, dtype=float) for name, fractions in explained.items()}
    numbers = np.arange(1, 1 + len(next(iter(percents.values()))))
    for (name, percent), colour, shape in zip(percents.items(), COLOURS, SHAPES, strict=False):
        axes.plot(numbers, percent, color=colour, marker=shape, label=name)
    number_ticks(axes.xaxis, len(numbers), 1)
    axes.set_xlabel("TSSA layer")
    axes.set_ylabel("variance explained (%)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    lines = {f"explained by {name} (%)": (numbers.tolist(), percent.tolist()) for name, percent in percents.items()}
    return Chart(figure, **line_data("TSSA layer", lines))


def classes_chart(results: Mapping[str, Any]) -> Chart:
    """Mean surplus of each word class in each head, in some layers."""
    surplus_LCH = np.array(results["word_class_surplus"])
    chosen = select_layers(len(surplus_LCH))
    names = [
        f"{name} ({count:,})"
        for name, count in zip(results["word_classes"], results["word_class_tokens"], strict=True)
    ]  # fmt: skip
    largest = max(float(np.abs(surplus_LCH[chosen]).max()), 1e-9)
    figure = Figure(figsize=(2.6 + 1.7 * len(chosen), 0.9 + 0.3 * max(len(names), 3)), layout="constrained")
    panels = figure.subplots(1, len(chosen), squeeze=False, sharey=True)[0]
    image: Any = None
    for axes, number in zip(panels, chosen, strict=True):
        # PuOr is safe for red-green colour blindness and white at 0.
        image = axes.imshow(
            surplus_LCH[number], cmap="PuOr", norm=TwoSlopeNorm(0, -largest, largest), aspect="auto"
        )  # fmt: skip
        number_ticks(axes.xaxis, surplus_LCH.shape[2], 0)
        axes.set_xlabel("head")
        axes.set_title(f"TSSA layer {number + 1}", fontsize=10)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    figure.colorbar(image, ax=panels, label="surplus\n(std. dev.)")
    rows = [
        [layer, name, head, value]
        for layer, surplus_CH in enumerate(surplus_LCH.tolist(), start=1)
        for name, values in zip(results["word_classes"], surplus_CH, strict=True)
        for head, value in enumerate(values, start=1)
    ]
    return Chart(figure, ["TSSA layer", "word class", "head", "surplus (standard deviations)"], rows)


def visible(text: str) -> str:
    """A token's text with visible white space."""
    return text.translate(VISIBLE) or "end of text"


def _words(words: Sequence[Mapping[str, Any]]) -> str:
    cells = (
        f"“{visible(word['text'])}” {with_error(word['surplus'], word['tokens'] ** -0.5, '+.1f')}"
        for word in words[:WORDS_IN_TABLE]
    )
    return " · ".join(cells) or "–"
