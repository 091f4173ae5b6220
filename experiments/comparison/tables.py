"""The tables of the stored results: means over seeds, and differences to the first form, paired by seed."""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from experiments.comparison.text import DISTANCES, gain
from tost_lm.markdown import table

T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""The 97.5 % quantile of Student's t, by the number of values."""
MEASURES = ("windows", "loss", "far", "copy", *(f"rare {name}" for name in DISTANCES), "loss_without_attention")
DECISIVE = ("loss", "far", "copy", "rare 2k-8k")
"""Those of the rules in docs/experiments.md."""


def tables(results: Sequence[dict[str, Any]]) -> str:
    """Means, and paired differences to the form that is stored first, with 95 % t-intervals over seeds."""
    forms = dict.fromkeys(result["form"] for result in results)
    by_seed = {form: {one["seed"]: one for one in results if one["form"] == form} for form in forms}
    means = [(form, str(len(of)), *(_mean(measure, of) for measure in MEASURES)) for form, of in by_seed.items()]
    parts = [table(("form", "seeds", *MEASURES), means)]
    first, *others = by_seed
    differences = [
        (form, *(_difference(measure, by_seed[form], by_seed[first]) for measure in DECISIVE)) for form in others
    ]
    if others:
        parts += [f"Minus {first}:", table(("form", *DECISIVE), differences)]
    return "\n\n".join(parts)


def recall_table(results: Sequence[dict[str, Any]]) -> str:
    """Mean accuracy over seeds by length, lowest and highest in brackets."""
    rows = []
    for form in dict.fromkeys(result["form"] for result in results):
        for kind, name in (("accuracy", form), ("without_attention", f"{form}, attention zeroed")):
            of = [result[kind] for result in results if result["form"] == form and kind in result]
            cells = [[100 * one[length] for one in of] for length in (of[0] if of else ())]
            texts = (f"{fmean(cell):.0f} % ({min(cell):.0f} to {max(cell):.0f})" for cell in cells)
            rows += [(name, str(len(of)), *texts)] if of else []
    return table(("form", "seeds", "at 1 ×", "at 4 ×", "at 16 ×"), rows) if rows else ""


def _value(measure: str, result: dict[str, Any]) -> float | None:
    kind, _, distance = measure.partition(" ")
    if kind not in result:
        return None
    return gain(result, distance) if distance else fmean(result[kind])


def _mean(measure: str, of_seeds: dict[int, Any]) -> str:
    values = [value for one in of_seeds.values() if (value := _value(measure, one)) is not None]
    return f"{fmean(values):.3f}" if values else "–"


def _difference(measure: str, ours: dict[int, Any], theirs: dict[int, Any]) -> str:
    pairs = [(_value(measure, ours[seed]), _value(measure, theirs[seed])) for seed in ours.keys() & theirs.keys()]
    values = [a - b for a, b in pairs if a is not None and b is not None]
    if len(values) < 2:
        return f"{fmean(values):+.3f}" if values else "–"
    error = T_QUANTILES[len(values)] * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):+.3f} ± {error:.3f}"
