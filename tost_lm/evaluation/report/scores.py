"""Metrics that compare groups of runs, and reasons why a comparison is limited."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tost_lm.evaluation.config import NEEDLE, TASKS
from tost_lm.evaluation.report.charts import column
from tost_lm.evaluation.report.groups import Group, Mean, at_step, common_steps, seed
from tost_lm.evaluation.report.retrieval import mean_score
from tost_lm.evaluation.subject import HELDOUT, MEMBERSHIPS, TEXT

PROTOCOLS = (HELDOUT, *TASKS, MEMBERSHIPS, TEXT)


class Score(NamedTuple):
    """A mean over the runs of a group."""

    mean: Mean
    step: int | None
    """Step of the measurement; None if it has none."""


class Metric(NamedTuple):
    """A column of the table of results."""

    name: str
    form: str
    """Format specification."""
    of: Callable[[Group], Score | None]
    """None if no run has a value or the runs have values at different steps."""


def validation_loss(group: Group) -> Score | None:
    return _loss([run.validation for run in group.runs if run.validation])


def bits_per_byte(results: dict[str, Any]) -> float:
    return results["model"]["bits_per_byte"]


def choice_accuracy(results: dict[str, Any]) -> float:
    return mean_score(results["cells"], "choice_accuracy")


METRICS = [
    Metric("training loss", ".4f", lambda group: _loss([run.metrics for run in group.runs])),
    Metric("validation loss", ".4f", validation_loss),
    Metric("held-out bits per byte", ".4f", lambda group: _result(group, HELDOUT, bits_per_byte)),
    Metric("text file, bits per byte", ".4f", lambda group: _result(group, TEXT, bits_per_byte)),
    Metric("needle choice accuracy", ".1%", lambda group: _result(group, NEEDLE, choice_accuracy)),
    Metric("tokens/s/device", ",.0f", lambda group: _over_rows(group, "tokens_per_second_device", np.nanmedian)),
    Metric("peak memory (GB)", ",.2f", lambda group: _over_rows(group, "memory_peak_bytes", np.nanmax, scale=1e-9)),
]


def gap_to_best(groups: Sequence[Group]) -> dict[int, Mean]:
    """Validation loss minus that of the best group, by group number, paired by seed.

    The pairs share the order of the data, which removes its effect. Empty unless two groups share seeds.
    """
    means = {group.number: score.mean.value for group in groups if (score := validation_loss(group))}
    losses = {group.number: _losses_by_seed(group) for group in groups if group.number in means}
    if len(means) < 2:
        return {}
    best = losses[min(means, key=lambda number: means[number])]
    differences = {
        number: Mean.of([own[key] - best[key] for key in own if key in best]) for number, own in losses.items()
    }
    found = {number: mean for number, mean in differences.items() if mean}
    return found if len(found) > 1 else {}


def _losses_by_seed(group: Group) -> dict[tuple[int, int], float]:
    """Last validation loss by (seed, step)."""
    return {(seed(run), row["step"]): row["loss"] for run in group.runs for row in run.validation[-1:] if row["loss"]}


def limitations(groups: Sequence[Group]) -> Iterator[str]:
    """Reasons why the groups are not fully comparable, a sentence each."""
    for group in groups:
        yield from _limitations_within(group)
    runs = [run for group in groups for run in group.runs]
    if any(path.startswith("data.") or path == "model.vocab_size" for group in groups for path in group.settings):
        yield "The groups have different training data or vocabularies, so their losses per token are not comparable."
    if len({run.validation[-1]["tokens"] for run in runs if run.validation}) > 1:
        yield "The validation losses are from different numbers of tokens."
    for protocol in PROTOCOLS:
        identities = [results["identity"] for run in runs if (results := run.results(protocol))]
        if any(_inputs(identity) != _inputs(identities[0]) for identity in identities):
            yield f"The results of {protocol} are from different texts or settings."


def _limitations_within(group: Group) -> Iterator[str]:
    last = {run.folder: run.metrics[-1]["step"] for run in group.runs}
    if len(set(last.values())) > 1:
        listed = ", ".join(f"{name} at {step:,}" for name, step in last.items())
        steps = common_steps([run.metrics for run in group.runs])
        how = f"compared at their last common step {steps[-1]:,}" if steps else "not compared (no common step)"
        yield f"The runs of group {group.number} ended at different steps ({listed}) and are {how}."
    if len({seed(run) for run in group.runs}) < len(group.runs):
        yield f"Some runs of group {group.number} have the same seed, so the standard error is not over seeds."
    for protocol in PROTOCOLS:
        found = {run.folder: results["identity"]["step"] for run in group.runs if (results := run.results(protocol))}
        if len(set(found.values())) > 1:
            steps = ", ".join(f"{name} after {step:,}" for name, step in found.items())
            yield f"The results of {protocol} in group {group.number} have no mean: the steps differ ({steps})."


def _loss(records: Sequence[Sequence[dict[str, Any]]]) -> Score | None:
    """Mean at the last common step."""
    steps = common_steps(records)
    if not steps:
        return None
    mean = Mean.of(column([at_step(rows, steps[-1]) for rows in records], "loss").tolist())
    return mean and Score(mean, steps[-1])


def _over_rows(group: Group, key: str, of: Callable[[np.ndarray], float], scale: float = 1) -> Score | None:
    """Mean over runs of a statistic of the logged values."""
    logged = [column(run.metrics, key) for run in group.runs]
    mean = Mean.of([float(of(values)) * scale for values in logged if not np.isnan(values).all()])
    return mean and Score(mean, None)


def _result(group: Group, protocol: str, score: Callable[[dict[str, Any]], float]) -> Score | None:
    results = [results for run in group.runs if (results := run.results(protocol))]
    steps = {result["identity"]["step"] for result in results}
    mean = Mean.of([score(result) for result in results])
    return Score(mean, steps.pop()) if mean and len(steps) == 1 else None


def _inputs(identity: dict[str, Any]) -> tuple[Any, ...]:
    return identity["shards_fingerprint"], identity.get("text_sha256"), identity["settings"]
