"""The runs of the comparison, and which of them can start: later stages use what earlier ones have found.

1. screen: text, 1 M tokens, one seed, learning rates 2, 4 and 8e-3, and further ones while the best is at an edge.
2. finals: text, 3 M tokens, three seeds, each form at its best rate; of mamba2 and hgrn2 the better one.
3. mqar-rates: recall of 16 pairs, one seed, rates 1e-3 and 3e-3.
4. mqar: recall of 32 pairs, three seeds, each form at its better rate.
5. hybrids, hybrids-recall: text of 3 M tokens, and recall of 16 pairs at 1, 4 and 16 times the trained length, three
   seeds, at the rates of the window hybrid.
6. long: text, 18 M tokens, one seed: slots, the best other form of constant state, and softmax attention.
7. states: recall of 64 pairs, one seed, with as many and twice as many keys: the two best forms of constant state.

Bars for the hybrids, set before their runs. Full softmax layers are recommended only if the interval of full-hybrid −
hybrid on text ends at or below 0.01, and if recall at 16 times the length is at least 5 points above that of the
window. They keep rotary embedding only if, without it, neither the interval on text ends at or below 0 nor recall at 16
times the length is 5 points higher. Gated delta layers are recommended over slots in full hybrids only if their
interval on text ends at or below 0.01, and recall at 16 times the length is at most 5 points lower.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from experiments.forms.catalog import CATALOG, CONSTANT, FULL_HYBRIDS, forms_of
from experiments.forms.recall import LAYERS

Run = dict[str, Any]
"""Identity of a run: `stage`, `name`, `seed`, `lr`; of text `tokens`; of recall `pairs` and `state`; its forms."""
Result = Mapping[str, Any]
"""`run` and what was measured."""

COMPARED = tuple(name for name in CATALOG if name not in (*FULL_HYBRIDS, "slots-window"))
GATED_LINEAR = ("mamba2", "hgrn2")
RATES, EDGES = (2e-3, 4e-3, 8e-3), (5e-4, 6.4e-2)
MQAR_RATES = (1e-3, 3e-3)
SEEDS = (0, 1, 2)
STATES = (1, 2)
TOKENS = {"screen": 1_000_000, "finals": 3_000_000, "long": 18_000_000, "hybrids": 3_000_000}
TEXT_LAYERS = 4


def startable(results: Sequence[Result]) -> Iterator[Run]:
    """The runs without a result whose earlier stages are finished, in their order."""
    finished = [result["run"] for result in results]
    for run in _known(results):
        if run not in finished:
            yield run


def _known(results: Sequence[Result]) -> Iterator[Run]:
    for name in COMPARED:
        yield from (text_run("screen", name, lr, 0) for lr in rates_to_screen(results, name))
    finalists = _finalists(results)
    for seed in SEEDS:
        for name in finalists:
            lr = best_rate(results, "slots" if name == "slots-window" else name)
            if lr is not None:
                yield text_run("finals", name, lr, seed)
    for lr in MQAR_RATES:
        yield from (recall_run("mqar-rates", name, lr, 0, pairs=16) for name in finalists if name in COMPARED)
    for seed in SEEDS:
        for name in finalists:
            if name in COMPARED and (lr := best_mqar_rate(results, name)):
                yield recall_run("mqar", name, lr, seed, pairs=32)
    yield from _hybrids(results)
    if rival := best_rival(results):
        for name in ("slots", rival, "softmax"):
            yield text_run("long", name, best_rate(results, name), 0)
    for name in best_at_recall(results):
        for state in STATES:
            yield recall_run("states", name, best_mqar_rate(results, name), 0, pairs=64, state=state)


def _hybrids(results: Sequence[Result]) -> Iterator[Run]:
    lr, mqar_lr = best_rate(results, "hybrid"), best_mqar_rate(results, "hybrid")
    if lr and mqar_lr:
        for seed in SEEDS:
            yield from (text_run("hybrids", name, lr, seed) for name in FULL_HYBRIDS)
            for name in ("hybrid", *FULL_HYBRIDS):
                yield recall_run("hybrids-recall", name, mqar_lr, seed, pairs=16)


def text_run(stage: str, name: str, lr: float | None, seed: int) -> Run:
    return {"stage": stage, "name": name, "lr": lr, "seed": seed, "tokens": TOKENS[stage], **_forms(name, TEXT_LAYERS)}


def recall_run(stage: str, name: str, lr: float | None, seed: int, pairs: int, state: int = 1) -> Run:
    sizes = {"pairs": pairs, "state": state}
    return {"stage": stage, "name": name, "lr": lr, "seed": seed, **sizes, **_forms(name, LAYERS, state)}


def rates_to_screen(results: Sequence[Result], name: str) -> list[float]:
    """The rates of the screening, and the next one while the best is at an edge."""
    rates = list(RATES)
    while loss_of := _losses(results, "screen", name):
        if not set(rates) <= loss_of.keys():
            break
        best = min(rates, key=lambda lr: loss_of[lr])
        further = best / 2 if best == rates[0] else best * 2
        if best in rates[1:-1] or not EDGES[0] <= further <= EDGES[1]:
            break
        rates = sorted([*rates, further])
    return rates


def best_rate(results: Sequence[Result], name: str) -> float | None:
    """The best rate of the screening; None: it is not finished."""
    rates, loss_of = rates_to_screen(results, name), _losses(results, "screen", name)
    return min(rates, key=lambda lr: loss_of[lr]) if set(rates) <= loss_of.keys() else None


def best_mqar_rate(results: Sequence[Result], name: str) -> float | None:
    """The rate with the higher accuracy, of two that are learned the one with fewer steps; None: not both are known."""
    found = {r["run"]["lr"]: r for r in results if (r["run"]["stage"], r["run"]["name"]) == ("mqar-rates", name)}
    if not set(MQAR_RATES) <= found.keys():
        return None
    return max(MQAR_RATES, key=lambda lr: (min(found[lr]["accuracy"], 0.99), -found[lr]["steps"]))


def best_rival(results: Sequence[Result]) -> str | None:
    """The other form of constant state with the lowest loss in the finals; None: they are not finished."""
    rivals = [name for name in _finalists(results) if name in CONSTANT and name != "slots"]
    losses = {name: _of(results, "finals", name, "loss") for name in rivals}
    if not losses or any(len(found) < len(SEEDS) for found in losses.values()):
        return None
    return min(rivals, key=lambda name: mean(losses[name]))


def best_at_recall(results: Sequence[Result]) -> list[str]:
    """The two forms of constant state with the highest accuracy at 32 pairs; none: the stage is not finished."""
    names = [name for name in _finalists(results) if name in CONSTANT]
    found = {name: _of(results, "mqar", name, "accuracy") for name in names}
    if not found or any(len(accuracies) < len(SEEDS) for accuracies in found.values()):
        return []
    return sorted(names, key=lambda name: -mean(found[name]))[:2]


def _finalists(results: Sequence[Result]) -> list[str]:
    """All forms but the worse one of gated linear attention; without both, until the screening of both is finished."""
    loss = {name: min(_losses(results, "screen", name).values(), default=0.0) for name in GATED_LINEAR}
    is_known = all(best_rate(results, name) is not None for name in GATED_LINEAR)
    better = [min(GATED_LINEAR, key=lambda name: loss[name])] if is_known else []
    return [name for name in CATALOG if name not in (*FULL_HYBRIDS, *GATED_LINEAR) or name in better]


def _losses(results: Sequence[Result], stage: str, name: str) -> dict[float, float]:
    return {r["run"]["lr"]: r["loss"] for r in results if (r["run"]["stage"], r["run"]["name"]) == (stage, name)}


def _of(results: Sequence[Result], stage: str, name: str, key: str) -> list[float]:
    return [r[key] for r in results if (r["run"]["stage"], r["run"]["name"]) == (stage, name)]


def _forms(name: str, layers: int, state: int = 1) -> Run:
    # Finished runs name `rotary` only where it is off.
    dumps = (form.model_dump(exclude={"rotary"} if form.rotary else None) for form in forms_of(name, layers, state))
    return {"forms": list(dumps)}
