"""Means over texts of the scores of questions.

Questions of one text are not independent, so a text counts with the mean over its questions, and errors are over texts.
"""

from collections.abc import Sequence
from statistics import mean, stdev

from tost_lm.tasks.task import Row

MEANS = {
    "choice": "choice_accuracy",
    "found": "found_share",
    "exact": "exact_accuracy",
    "tokens": "token_accuracy",
    "nats": "answer_nats",
    "nats_per_token": "nats_per_token",
}
"""Keys of means, by the key of rows."""


def totals_of(rows: Sequence[Row]) -> Row:
    """Means of questions whose answers are in the text, and of controls, with standard errors (None for one text).

    The gain over the control is the nats per token by which the text lowers the answer, paired by text.
    """
    totals: Row = {}
    for prefix, condition in (("", "needle"), ("control_", "control")):
        own = [row for row in rows if row["condition"] == condition]
        for key, name in MEANS.items():
            if own and key in own[0]:
                totals |= _mean(prefix + name, of_texts(own, key))
    if "control_nats_per_token" in totals:
        signed = [row | {"gain": row["nats_per_token"] * (-1 if row["condition"] == "needle" else 1)} for row in rows]
        totals |= _mean("gain_over_control", [2 * gain for gain in of_texts(signed, "gain")])
    return totals


def of_texts(rows: Sequence[Row], key: str) -> list[float]:
    """The mean over the rows of each text, in the order of their numbers."""
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row["sample"], []).append(row[key])
    return [mean(values[sample]) for sample in sorted(values)]


def _mean(name: str, values: Sequence[float]) -> Row:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {name: mean(values), f"{name}_standard_error": error}
