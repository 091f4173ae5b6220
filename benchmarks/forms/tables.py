"""Tables of finished runs."""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any

from benchmarks.measure import markdown_table

T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % quantiles of Student's t by number of pairs."""
REFERENCE = "published"
SIZES = ("vocab_size", "tokens", "layers", "width", "batch", "seq_len")
Result = Mapping[str, Any]


def tables(results: Sequence[Result]) -> str:
    """Text by number of tokens, and MQAR; means over seeds, best first."""
    parts = []
    read = [r for r in results if r["run"]["task"] == "text"]
    for (vocabulary, tokens, layers, width, batch, length), group in sorted(_grouped(read, *SIZES).items()):
        size = f"{layers} layers of width {width}, vocabulary {vocabulary:,}, {batch} × {length} tokens a step"
        parts.append(f"Text, {tokens / 1e6:g} M tokens: {size}\n\n{text_table(group)}")
    if recalled := [r for r in results if r["run"]["task"] == "mqar"]:
        parts.append(f"MQAR, accuracy at queries by number of pairs\n\n{mqar_table(recalled)}")
    return "\n\n".join(parts)


def text_table(results: Sequence[Result]) -> str:
    """A row for each model and learning rate. Differences are paired by seed with the reference's best rate."""
    groups = _grouped(results, "name", "lr")
    reference = min((g for (name, _), g in groups.items() if name == REFERENCE), key=_loss, default=[])
    rows = []
    for (name, lr), group in sorted(groups.items(), key=lambda item: _loss(item[1])):
        rows.append(
            {
                "model": name,
                "lr": f"{lr:g}",
                "seeds": f"{len(group)}",
                "loss": f"{_loss(group):.3f}",
                f"− {REFERENCE}": difference(group, reference, "loss"),
                "gain from context": f"{_mean(group, 'context_gain'):+.3f}",
                "repeated bigrams": f"{_mean(group, 'repeated_bigrams'):.3f}",
                "copy": f"{_mean(group, 'copy'):+.3f}",
                "far": "–" if group[0]["far"] is None else f"{_mean(group, 'far'):+.3f}",
                "state": state(group[0]["state_numbers"]),
                "parameters": f"{group[0]['parameters']:,}",
                "tokens/s": f"{_mean(group, 'tokens_per_second'):,.0f}",
            }
        )
    return markdown_table(rows)


def mqar_table(results: Sequence[Result]) -> str:
    rows = []
    sizes = sorted({r["run"]["pairs"] for r in results})
    for (name,), group in _grouped(results, "name").items():
        row = {"model": name, "state": state(group[0]["state_numbers"])}
        for pairs in sizes:
            accuracies = [r["accuracy"] for r in group if r["run"]["pairs"] == pairs]
            lowest = f" (lowest of {len(accuracies)})" if len(accuracies) > 1 else ""
            row[f"{pairs}"] = f"{min(accuracies):.1%}{lowest}" if accuracies else "–"
        rows.append(row)
    return markdown_table(rows)


def difference(group: Sequence[Result], reference: Sequence[Result], key: str) -> str:
    """The mean difference of runs with equal seeds, with its 95 % t-interval."""
    of_seed = {r["run"]["seed"]: r[key] for r in reference}
    pairs = [r[key] - of_seed[r["run"]["seed"]] for r in group if r["run"]["seed"] in of_seed]
    if not pairs or reference is group:
        return "–"
    interval = f" ± {T_QUANTILES[len(pairs)] * stdev(pairs) / sqrt(len(pairs)):.3f}" if len(pairs) > 1 else ""
    return f"{mean(pairs):+.3f}{interval}"


def state(numbers: Sequence[int | None]) -> str:
    """Numbers a layer; of a hybrid those of its first layer and of its last."""
    shown = ["grows" if n is None else f"{n:,}" for n in dict.fromkeys(numbers)]
    return " and ".join(shown)


def _grouped(results: Sequence[Result], *keys: str) -> dict[tuple[Any, ...], list[Result]]:
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result["run"][key] for key in keys), []).append(result)
    return groups


def _mean(group: Sequence[Result], key: str) -> float:
    return mean(result[key] for result in group)


def _loss(group: Sequence[Result]) -> float:
    return _mean(group, "loss")
