"""HTML page of a text whose tokens are coloured by the head with the largest surplus.

Shapes: T tokens, L TSSA layers, H heads.
"""

from collections.abc import Sequence
from html import escape

from torch import Tensor

# The colour-blind-safe palette of M. Okabe and K. Ito ("Color Universal Design", 2008) without black.
COLOURS = ("230,159,0", "86,180,233", "0,158,115", "240,228,66", "0,114,178", "213,94,0", "204,121,167", "153,153,153")
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
        f'<h2>TSSA layer {number}</h2>\n<p class="text">{_text(texts, surplus_TH)}</p>'
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


def _text(texts: Sequence[str], surplus_TH: Tensor) -> str:
    largest_T, head_T = surplus_TH.max(-1)
    return "".join(
        _span(
            text.replace("\n", "↵\n"), head, MAX_OPACITY * min(max(largest, 0) / FULL_SURPLUS, 1),
            f"head {head + 1}, {largest:+.2f}" if largest > 0 else "no head",
        )
        for text, head, largest in zip(texts, head_T.tolist(), largest_T.tolist(), strict=True)
    )  # fmt: skip


def _span(text: str, head: int, opacity: float, hint: str = "") -> str:
    underline = UNDERLINES[head // len(COLOURS) % len(UNDERLINES)]
    decoration = "" if underline == "none" else f";text-decoration:{underline}"
    style = f"background:rgba({COLOURS[head % len(COLOURS)]},{opacity:.2f}){decoration}"
    title = f' title="{hint}"' if hint else ""
    return f'<span style="{style}"{title}>{escape(text)}</span>'
