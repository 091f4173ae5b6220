"""Tables of finished runs."""

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any

from experiments.forms.catalog import CATALOG
from experiments.forms.recall import STEPS
from experiments.forms.sweep import Result, best_mqar_rate, best_rate
from tost_lm.markdown import table

T_QUANTILES = {2: 12.706, 3: 4.303}
"""97.5 % quantiles of Student's t by number of pairs."""
REFERENCE = "slots"
BUDGET_HOURS = 14


def tables(results: Sequence[Result]) -> str:
    """The screened rates, text at 3 and 18 M tokens, recall, and the time of all runs."""
    parts = [
        ("Text, 1 M tokens, one seed: loss by learning rate", _screening(results)),
        ("Text, 3 M tokens: means over seeds; differences are paired by seed, with 95 % t-intervals",
         _text(results, "finals")),
        ("Text, 18 M tokens, one seed", _text(results, "long")),
        ("MQAR of 32 pairs in 256 tokens: accuracy at queries", _recall(results)),
        ("Hybrids: text of 3 M tokens, and MQAR of 16 pairs in 128 tokens, also in 4 and 16 times as many",
         _hybrids(results)),
        ("MQAR of 64 pairs in 512 tokens, one seed, by recurrent state", _states(results)),
    ]  # fmt: skip
    hours = sum(r["seconds"] for r in results if not r["run"]["stage"].startswith("hybrids")) / 3600
    used = f"The runs took {hours:.1f} hours of one core, of a budget of {BUDGET_HOURS}, without those of hybrids."
    return "\n\n".join([*(f"{title}\n\n{_table(rows)}" for title, rows in parts if rows), used])


def _table(rows: Sequence[dict[str, str]]) -> str:
    return table(list(rows[0]), [list(row.values()) for row in rows])


def difference(group: Sequence[Result], reference: Sequence[Result], key: str = "loss") -> str:
    """The mean difference of runs with equal seeds, with its 95 % t-interval."""
    of_seed = {r["run"]["seed"]: r[key] for r in reference}
    pairs = [r[key] - of_seed[r["run"]["seed"]] for r in group if r["run"]["seed"] in of_seed]
    if not pairs or reference is group:
        return "–"
    interval = f" ± {T_QUANTILES[len(pairs)] * stdev(pairs) / sqrt(len(pairs)):.3f}" if len(pairs) > 1 else ""
    return f"{mean(pairs):+.3f}{interval}"


def _screening(results: Sequence[Result]) -> list[dict[str, str]]:
    rows = []
    for name, group in _by_name(results, "screen"):
        losses = sorted((r["run"]["lr"], r["loss"]) for r in group)
        best = best_rate(results, name)
        rows.append(
            {
                "model": name,
                "losses": ", ".join(f"{lr:g}: {loss:.3f}" for lr, loss in losses),
                "chosen rate": "–" if best is None else f"{best:g}",
            }
        )
    return rows


def _text(results: Sequence[Result], stage: str) -> list[dict[str, str]]:
    groups = dict(_by_name(results, stage))
    rows = []
    for name, group in sorted(groups.items(), key=lambda item: _mean(item[1], "loss")):
        rows.append(
            {
                "model": name,
                "lr": f"{group[0]['run']['lr']:g}",
                "seeds": f"{len(group)}",
                "loss": f"{_mean(group, 'loss'):.3f}",
                f"− {REFERENCE}": difference(group, groups.get(REFERENCE, [])),
                "gain from context": f"{_mean(group, 'context_gain'):+.3f}",
                "copy": f"{_mean(group, 'copy'):+.3f}",
                "far": f"{_mean(group, 'far'):+.3f}",
                "state": state(group[0]["state_numbers"]),
                "taps": state(group[0]["tap_numbers"]),
                "MLP channels": f"{group[0]['mlp_channels']}",
                "parameters": f"{group[0]['parameters']:,}",
                "seconds": f"{_mean(group, 'seconds'):,.0f}",
            }
        )
    return rows


def _recall(results: Sequence[Result]) -> list[dict[str, str]]:
    rows = []
    for name, group in _by_name(results, "mqar"):
        rows.append(
            {
                "model": name,
                "lr": f"{best_mqar_rate(results, name):g}",
                "accuracy": f"{_mean(group, 'accuracy'):.1%}",
                "by seed": ", ".join(f"{r['accuracy']:.1%}" for r in group),
                f"steps of {STEPS:,}": ", ".join(f"{r['steps']:,}" for r in group),
                "state": state(group[0]["state_numbers"]),
                "parameters": f"{group[0]['parameters']:,}",
            }
        )
    return rows


def _hybrids(results: Sequence[Result]) -> list[dict[str, str]]:
    text = dict([*_by_name(results, "finals"), *_by_name(results, "hybrids")])
    rows = []
    for name, group in _by_name(results, "hybrids-recall"):
        row = {"model": name, "seeds": f"{len(group)}"}
        if of_text := text.get(name):
            row["loss"] = f"{_mean(of_text, 'loss'):.3f}"
            row |= {f"− {other}": difference(of_text, text.get(other, [])) for other in ("hybrid", "full-hybrid")}
        for length in group[0]["accuracy_by_length"]:
            accuracies = [r["accuracy_by_length"][length] for r in group]
            row[f"recall at {length} ×"] = f"{mean(accuracies):.1%} ({min(accuracies):.1%} to {max(accuracies):.1%})"
        rows.append(row | {"parameters": f"{group[0]['parameters']:,}"})
    return rows


def _states(results: Sequence[Result]) -> list[dict[str, str]]:
    rows = []
    for name, group in _by_name(results, "states"):
        of_state = {state(r["state_numbers"]): f"{r['accuracy']:.1%}" for r in group}
        rows.append({"model": name, "accuracy by state": ", ".join(f"{n}: {a}" for n, a in of_state.items())})
    return rows


def state(numbers: Sequence[int | None]) -> str:
    """Numbers a layer; of a hybrid those of its first layer and of its last."""
    return " and ".join("grows" if n is None else f"{n:,}" for n in dict.fromkeys(numbers))


def _by_name(results: Sequence[Result], stage: str) -> list[tuple[str, list[Result]]]:
    of_stage = [result for result in results if result["run"]["stage"] == stage]
    groups = [(name, [r for r in of_stage if r["run"]["name"] == name]) for name in CATALOG]
    return [(name, group) for name, group in groups if group]


def _mean(group: Sequence[Any], key: str) -> float:
    return mean(result[key] for result in group)
