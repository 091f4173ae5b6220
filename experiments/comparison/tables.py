"""The tables of the stored results: means over seeds, and differences to the first form, paired by seed and by book."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from tost_lm.markdown import table

T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""The 97.5 % quantile of Student's t, by the number of values."""
COMPARED = ("windows", "loss")
"""Those whose differences rank forms by the rules in docs/experiments.md."""
MEASURES = (*COMPARED, "copy", "loss_without_attention")
ALL = (*MEASURES, "far", "rare 2k-8k")
LONGER = "-10m"
"""The end of the names of forms that trained on 10 million tokens, which are compared with each other."""
OF_PASSAGES = ("copy", "needle 512", "needle 4096")


def tables(
    results: Sequence[dict[str, Any]], at_rates: Sequence[dict[str, Any]] = (), measures: Sequence[str] = MEASURES
) -> str:
    """Means, and paired differences to the form that is stored first; 95 % t-intervals over seeds, and over books.
    Means of models that were asked for needles follow, and `windows` of models of one seed by learning rate. Other
    forms of one seed are only among `ALL` measures."""
    by_seed = _by_form([one for one in results if "needle" not in one])
    parts = [_means({form: of for form, of in by_seed.items() if len(of) > 1 or measures is ALL}, measures)]
    first = next(iter(by_seed))
    base = {form: first + LONGER if form.endswith(LONGER) else first for form in by_seed}
    differences = [
        (form, *(_difference(measure, by_seed[form], by_seed.get(base[form], {})) for measure in COMPARED))
        for form in by_seed
        if form != base[form]
    ]
    if measured := [row for row in differences if any(" ± " in cell for cell in row)]:
        parts += [f"Minus {first}, of as many tokens:", table(("form", *COMPARED), measured)]
    if asked := _by_form([one for one in results if "needle" in one]):
        parts += [
            "With recall passages; needle N is the share of eight keys that are found in N tokens:",
            _means(asked, OF_PASSAGES),
        ]
    if at_rates:
        parts += ["`windows` by learning rate, one seed:", _windows_by_rate(at_rates)]
    return "\n\n".join(parts)


def _by_form(results: Sequence[dict[str, Any]]) -> dict[str, dict[int, Any]]:
    forms = dict.fromkeys(result["form"] for result in results)
    return {form: {one["seed"]: one for one in results if one["form"] == form} for form in forms}


def _means(by_form: dict[str, dict[int, Any]], measures: Sequence[str]) -> str:
    rows = [(form, str(len(of)), *(_mean(measure, of) for measure in measures)) for form, of in by_form.items()]
    return table(("form", "seeds", *measures), rows)


def _windows_by_rate(results: Sequence[dict[str, Any]]) -> str:
    of = {(one["form"], one["rate"]): _mean("windows", {0: one}) for one in results}
    rates = sorted({rate for _, rate in of})
    rows = [(form, *(of.get((form, rate), "–") for rate in rates)) for form in dict.fromkeys(form for form, _ in of)]
    return table(("form", *(f"{rate:g}" for rate in rates)), rows)


def _values(measure: str, result: dict[str, Any]) -> list[tuple[int, float]] | None:
    """Book and value of each stream, passage or rare word; None if it was not measured."""
    kind, _, distance = measure.partition(" ")
    if kind not in result:
        return None
    of_streams = result[kind][distance] if distance else [[value] for value in result[kind]]
    books = result["books"] if len(of_streams) == len(result["books"]) else [0] * len(of_streams)
    return [(book, value) for book, values in zip(books, of_streams, strict=True) for value in values]


def _mean(measure: str, of_seeds: dict[int, Any]) -> str:
    values = [fmean(value for _, value in found) for one in of_seeds.values() if (found := _values(measure, one))]
    return f"{fmean(values):.3f}" if values else "–"


def _difference(measure: str, ours: dict[int, Any], theirs: dict[int, Any]) -> str:
    of_seeds, of_books = [], defaultdict[int, list[float]](list)
    for seed in ours.keys() & theirs.keys():
        found = [_values(measure, of[seed]) for of in (ours, theirs)]
        if not all(found):
            return "–"
        (book_of, a), (_, b) = (zip(*values, strict=True) for values in found if values)
        of_seeds.append(fmean(a) - fmean(b))
        for book, x, y in zip(book_of, a, b, strict=True):
            of_books[book].append(x - y)
    if not of_seeds:
        return "–"
    over_books = _half_width(" ({:.3f})", [fmean(values) for values in of_books.values()])
    return f"{fmean(of_seeds):+.3f}{_half_width(' ± {:.3f}', of_seeds)}{over_books}"


def _half_width(form: str, values: Sequence[float]) -> str:
    """Of the 95 % interval of their mean; empty for one value."""
    return form.format(T_QUANTILES[len(values)] * stdev(values) / len(values) ** 0.5) if len(values) > 1 else ""
