"""Preferences of heads for tokens. The surplus of a token in a head is a standardised membership (z-score):

    surplus = (Π − mean of Π at that position in the other sequences) / (standard deviation of Π in the position bin)

Π of late tokens varies far less, and the division gives early and late tokens the same weight.

Shapes: N sequences, T tokens, L TSSA layers, H heads, K groups of tokens (for example by token id), P position bins.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost_lm.data.tokenizers.interface import decode_ids, token_text
from tost_lm.eval.analysis.layers import WORD_CLASSES, LayerTile, run_in_tiles, word_classes
from tost_lm.eval.analysis.memberships import MIN_DEVIATION, Analysis, ByPosition, explained_fraction
from tost_lm.files import write_atomically
from tost_lm.inference.protocol_names import TOKENS
from tost_lm.markdown import table, with_error
from tost_lm.model import TostLM
from tost_lm.report.page import (
    CONTRAST,
    DARK,
    SHAPES,
    Chart,
    Page,
    line_data,
    new_figure,
    new_panels,
    number_ticks,
    select_layers,
)
from tost_lm.report.protocols import analysis_section


class Surplus(NamedTuple):
    """Sums of the surplus over the tokens, float64."""

    sequences: int
    squares_L: Tensor
    """Sum of squares, over the heads as well."""
    by_group: dict[str, Tensor]
    """Sums by group [K, L, H], for each labelling."""
    sizes: dict[str, Tensor]
    """Number of tokens in each group [K], for each labelling; no group is empty."""


class Typical(NamedTuple):
    """Groups of tokens with the most extreme mean surplus in one head of one layer, as (group, mean surplus)."""

    most: list[tuple[int, float]]
    """The largest first."""
    least: list[tuple[int, float]]
    """The smallest first."""


def surpluses(model: TostLM, sequences_NT: Tensor, positions: ByPosition, labels: Mapping[str, Tensor]) -> Surplus:
    """Sums of the surplus of all tokens in the sequences.

    Args:
        positions: statistics of the same sequences.
        labels: group index of each token [N, T], int64, 0 to K − 1 without gaps, for each labelling.
    """
    layers, _, heads = positions.mean_LTH.shape
    zeros = partial(torch.zeros, dtype=torch.float64, device=sequences_NT.device)
    sizes = {name: labels_NT.flatten().bincount() for name, labels_NT in labels.items()}
    by_group = {name: zeros(len(size_K), layers, heads) for name, size_K in sizes.items()}
    found = Surplus(len(sequences_NT), zeros(layers), by_group, sizes)

    def on_tile(n: int, tile: LayerTile) -> None:
        surplus_TH = _surplus_of_tile(tile, positions)
        found.squares_L[tile.layer] += surplus_TH.square().sum()
        for name, labels_NT in labels.items():
            found.by_group[name][:, tile.layer].index_add_(0, labels_NT[n, tile.positions], surplus_TH)

    for n, tokens_T in enumerate(sequences_NT):
        run_in_tiles(model, tokens_T[None], partial(on_tile, n))
    return found


def explained_by(found: Surplus, labelling: str) -> list[float | None]:
    """Fraction of the variance of Π at a position that the groups explain (`explained_fraction`), by TSSA layer.

    No group can explain the 1/N of the surplus variance that comes from its mean; the fraction refers to the rest.
    """
    sums_KLH, sizes_K = found.by_group[labelling], found.sizes[labelling]
    between_L = (sums_KLH.square() / sizes_K[:, None, None]).sum((0, 2))
    count, groups = int(sizes_K.sum()), len(sizes_K)
    fractions = [
        explained_fraction(total - between, total, count, groups)
        for total, between in zip(found.squares_L.tolist(), between_L.tolist(), strict=True)
    ]
    return [None if x is None else x * found.sequences / (found.sequences - 1) for x in fractions]


def typical(found: Surplus, labelling: str, *, groups: int, tokens: int, errors: float) -> list[list[Typical]]:
    """The groups with the largest and the smallest mean surplus in each head of each TSSA layer, [L][H].

    Args:
        groups: largest length of each list.
        tokens: smallest size of a group.
        errors: smallest distance of the mean surplus from 0, in standard errors of as many random tokens.
    """
    kept_k = (found.sizes[labelling] >= tokens).nonzero()[:, 0]
    sizes_k11 = found.sizes[labelling][kept_k, None, None]
    means_kLH = found.by_group[labelling][kept_k] / sizes_k11
    variance = found.sequences / max(found.sequences - 1, 1)
    is_certain_kLH = means_kLH.abs() >= errors * (variance / sizes_k11).sqrt()
    order_kLH = means_kLH.argsort(dim=0, descending=True, stable=True)

    def listed(layer: int, head: int, sign: int) -> list[tuple[int, float]]:
        order_k = order_kLH[:, layer, head] if sign > 0 else order_kLH[:, layer, head].flip(0)
        means_k = means_kLH[order_k, layer, head]
        kept = order_k[is_certain_kLH[order_k, layer, head] & (sign * means_k > 0)][:groups]
        return [(int(kept_k[i]), float(means_kLH[i, layer, head])) for i in kept]

    _, layers, heads = means_kLH.shape
    return [
        [Typical(listed(layer, head, 1), listed(layer, head, -1)) for head in range(heads)] for layer in range(layers)
    ]


def surplus_of_text(model: TostLM, tokens_T: Tensor, positions: ByPosition) -> Tensor:
    """Surplus of the first tokens of one of the sequences [L, T, H]."""
    surplus_LTH = torch.zeros_like(positions.mean_LTH[:, : len(tokens_T)])

    def on_tile(tile: LayerTile) -> None:
        surplus_LTH[tile.layer, tile.positions] = _surplus_of_tile(tile, positions)

    run_in_tiles(model, tokens_T[None], on_tile)
    return surplus_LTH


def _surplus_of_tile(tile: LayerTile, positions: ByPosition) -> Tensor:
    """Surplus of the tile's only row [T, H]; 0 where Π does not vary."""
    deviation_PH = positions.deviation_LPH[tile.layer]
    per_deviation_PH = (1 / deviation_PH).where(deviation_PH > MIN_DEVIATION, 0)
    others = positions.sequences / max(positions.sequences - 1, 1)  # the mean includes the token itself
    difference_TH = tile.pi[0] - positions.mean_LTH[tile.layer, tile.positions]
    return others * difference_TH * per_deviation_PH[positions.bin_T[tile.positions]]


# The colour-blind-safe palette of M. Okabe and K. Ito ("Color Universal Design", 2008) without black.
HEAD_COLOURS = (
    "230,159,0",
    "86,180,233",
    "0,158,115",
    "240,228,66",
    "0,114,178",
    "213,94,0",
    "204,121,167",
    "153,153,153",
)
UNDERLINES = ("none", "underline solid", "underline dotted", "underline wavy")
MAX_OPACITY = 0.7  # black text stays readable
FULL_SURPLUS = 3.0  # standard deviations
STYLE = """
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.9 system-ui, sans-serif; color: #000;
       background: #fff; }
p.text { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ddd; padding: .6rem; }
span { padding: .1rem 0; border-radius: .2rem; text-underline-offset: .25rem; }
.legend span { padding: .1rem .5rem; margin-right: .4rem; }
"""


def coloured_page(title: str, texts: Sequence[str], surplus_LTH: Tensor) -> str:
    """One self-contained page with a copy of the text for each layer.

    The colour of a token names the head with its largest surplus. The opacity grows with the surplus up to
    `FULL_SURPLUS`. Heads of the same colour (more than 8 heads) differ in the underline. A tooltip has the numbers.
    """
    legend = "".join(_span(f"head {head + 1}", head, MAX_OPACITY) for head in range(surplus_LTH.shape[2]))
    layers = "\n".join(
        f'<h2>TSSA layer {number}</h2>\n<p class="text">{_coloured_text(texts, surplus_TH)}</p>'
        for number, surplus_TH in enumerate(surplus_LTH, start=1)
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        "<p>The colour names the head whose membership of the token is furthest above its mean at that position. "
        f"Full colour means {FULL_SURPLUS:g} standard deviations or more. ∎ is the end-of-text token. Hover over a "
        "token for the head and the number.</p>\n"
        f'<p class="legend">{legend}</p>\n{layers}\n</body>\n</html>\n'
    )


def _coloured_text(texts: Sequence[str], surplus_TH: Tensor) -> str:
    largest_T, head_T = surplus_TH.max(-1)
    return "".join(
        _span(
            text.replace("\n", "↵\n"), head, MAX_OPACITY * min(max(largest, 0) / FULL_SURPLUS, 1),
            f"head {head + 1}, {largest:+.2f}" if largest > 0 else "no head",
        )
        for text, head, largest in zip(texts, head_T.tolist(), largest_T.tolist(), strict=True)
    )  # fmt: skip


def _span(text: str, head: int, opacity: float, hint: str = "") -> str:
    underline = UNDERLINES[head // len(HEAD_COLOURS) % len(UNDERLINES)]
    decoration = "" if underline == "none" else f";text-decoration:{underline}"
    style = f"background:rgba({HEAD_COLOURS[head % len(HEAD_COLOURS)]},{opacity:.2f}){decoration}"
    title = f' title="{hint}"' if hint else ""
    return f'<span style="{style}"{title}>{escape(text)}</span>'


WORD, WORD_CLASS, DOCUMENT = "word", "word class", "document"
LISTED_WORDS, MIN_TOKENS, MIN_ERRORS = 8, 5, 4.0  # 1 of 16,000 random groups is beyond 4 standard errors
COLOURED_TOKENS = 300


def measure(of: Analysis, page: Path) -> dict[str, Any]:
    """Preferences of the heads for tokens; writes a text coloured by head to `page`."""
    tokens_K, word_NT = of.sequences.unique(return_inverse=True)
    classes_C, class_K = word_classes(of.tokenizer, tokens_K).unique(return_inverse=True)
    document_NT = of.text.documents_NT.unique(return_inverse=True)[1]
    labels = {WORD: word_NT, WORD_CLASS: class_K[word_NT], DOCUMENT: document_NT}
    found = surpluses(of.model, of.sequences, of.by_position, labels)
    texts = [token_text(of.tokenizer, token) for token in tokens_K.tolist()]
    sizes = found.sizes[WORD].tolist()

    def listed(groups: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        return [{"text": texts[word], "tokens": sizes[word], "surplus": surplus} for word, surplus in groups]

    lists = typical(found, WORD, groups=LISTED_WORDS, tokens=MIN_TOKENS, errors=MIN_ERRORS)
    of_classes_CLH = found.by_group[WORD_CLASS] / found.sizes[WORD_CLASS][:, None, None]
    write_atomically(page, _coloured(of))
    return {
        "explained": {name: explained_by(found, name) for name in labels},
        "word_classes": [list(WORD_CLASSES)[number] for number in classes_C.tolist()],
        "word_class_tokens": found.sizes[WORD_CLASS].tolist(),
        "word_class_surplus": of_classes_CLH.transpose(0, 1).tolist(),
        "least_tokens": MIN_TOKENS,
        "least_errors": MIN_ERRORS,
        "layers": [[{"most": listed(head.most), "least": listed(head.least)} for head in heads] for heads in lists],
    }


def _coloured(of: Analysis) -> str:
    tokens_T = of.sequences[0, :COLOURED_TOKENS]
    *texts, rest = decode_ids(of.tokenizer, tokens_T.tolist())
    texts[-1] += rest
    shown = ["∎" if token == of.tokenizer.eot else text for token, text in zip(tokens_T.tolist(), texts, strict=True)]
    return coloured_page("Text coloured by head", shown, surplus_of_text(of.model, tokens_T, of.by_position))


COLOURS = (DARK, CONTRAST, "0.55")
VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})
WORDS_IN_TABLE = 5


@analysis_section("Token preferences of the heads", TOKENS)
def section(results: dict[str, Any], page: Page) -> list[str]:
    """Explanations of the memberships, and typical tokens of each head."""
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
    figure, panels = new_panels(2.6 + 1.7 * len(chosen), 0.9 + 0.3 * max(len(names), 3), len(chosen), sharey=True)
    image: Any = None
    for axes, number in zip(panels, chosen, strict=True):
        # PuOr is safe for red-green colour blindness and white at 0.
        image = axes.imshow(surplus_LCH[number], cmap="PuOr", vmin=-largest, vmax=largest, aspect="auto")
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
