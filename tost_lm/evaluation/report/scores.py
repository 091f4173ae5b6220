"""The figures by which groups of runs are compared, and what forbids or limits a comparison."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tost_lm.evaluation.report.charts import column
from tost_lm.evaluation.report.groups import Group, Mean, at_step, common_steps, seed
from tost_lm.evaluation.report.retrieval import needle_mean
from tost_lm.evaluation.retrieval_config import NEEDLE, TASKS
from tost_lm.evaluation.subject import HELDOUT, MEMBERSHIPS, TEXT

PROTOCOLS = (HELDOUT, *TASKS, MEMBERSHIPS, TEXT)


class Score(NamedTuple):
    """A mean over the runs of a group."""

    mean: Mean
    step: int | None
    """After which it was measured; None: it belongs to no step."""


class Figure(NamedTuple):
    """A column of the table of results."""

    name: str
    form: str
    """As in a format string."""
    of: Callable[[Group], Score | None]
    """None: no run of the group has it, or those that have it have it at different steps."""


def training_loss(group: Group) -> Score | None:
    return _loss([run.metrics for run in group.runs])


def validation_loss(group: Group) -> Score | None:
    return _loss([run.validation for run in group.runs if run.validation])


def bits_per_byte(group: Group) -> Score | None:
    return _result(group, HELDOUT, lambda results: results["model"]["bits_per_byte"])


def text_bits_per_byte(group: Group) -> Score | None:
    return _result(group, TEXT, lambda results: results["model"]["bits_per_byte"])


def needle_accuracy(group: Group) -> Score | None:
    return _result(group, NEEDLE, lambda results: needle_mean(results, "choice_accuracy"))


def speed(group: Group) -> Score | None:
    return _over_rows(group, "tokens_per_second_device", np.nanmedian)


def memory(group: Group) -> Score | None:
    return _over_rows(group, "memory_peak_bytes", np.nanmax, scale=1e-9)


FIGURES = [
    Figure("training loss", ".4f", training_loss),
    Figure("validation loss", ".4f", validation_loss),
    Figure("held-out bits per byte", ".4f", bits_per_byte),
    Figure("text in one stream, bits per byte", ".4f", text_bits_per_byte),
    Figure("needle: right word chosen", ".1%", needle_accuracy),
    Figure("tokens/s a device", ",.0f", speed),
    Figure("memory peak (GB)", ",.2f", memory),
]


def behind_the_best(groups: Sequence[Group]) -> dict[int, Mean]:
    """By a group's number, how far its validation loss lies above that of the group with the lowest, run against run of
    the same seed: what a seed's order of data does to all groups alike drops out. Empty unless two groups share seeds.
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
    """Validation losses by seed and the step that they were measured after."""
    return {(seed(run), row["step"]): row["loss"] for run in group.runs for row in run.validation[-1:] if row["loss"]}


def limits(groups: Sequence[Group]) -> Iterator[str]:
    """What one must know before comparing, a sentence or two each."""
    for group in groups:
        yield from _limits_within(group)
    runs = [run for group in groups for run in group.runs]
    if any(path.startswith("data.") or path == "model.vocab_size" for group in groups for path in group.settings):
        yield "The groups were trained on different data or tokens, so their losses per token are of different texts."
    if len({run.validation[-1]["tokens"] for run in runs if run.validation}) > 1:
        yield "Validation losses were measured on different numbers of tokens."
    for protocol in PROTOCOLS:
        identities = [results["identity"] for run in runs if (results := run.results(protocol))]
        if any(_measured(identity) != _measured(identities[0]) for identity in identities):
            yield f"Results of {protocol} were made on different texts or with different settings."


def _limits_within(group: Group) -> Iterator[str]:
    last = {run.folder: run.metrics[-1]["step"] for run in group.runs}
    if len(set(last.values())) > 1:
        stand = ", ".join(f"{name} at {step:,}" for name, step in last.items())
        steps = common_steps([run.metrics for run in group.runs])
        how = f"compared at {steps[-1]:,}, the last that all logged" if steps else "not compared: they share none"
        yield f"The runs of group {group.number} stand at different steps ({stand}) and are {how}."
    if len({seed(run) for run in group.runs}) < len(group.runs):
        yield f"Some runs of group {group.number} have the same seed: their differences are not those of seeds."
    for protocol in PROTOCOLS:
        found = {run.folder: results["identity"]["step"] for run in group.runs if (results := run.results(protocol))}
        if len(set(found.values())) > 1:
            steps = ", ".join(f"{name} after {step:,}" for name, step in found.items())
            yield f"Results of {protocol} in group {group.number} are of different steps ({steps}): no mean is taken."


def _loss(records: Sequence[Sequence[dict[str, Any]]]) -> Score | None:
    """At the last step that all of them have."""
    steps = common_steps(records)
    if not steps:
        return None
    mean = Mean.of(column([at_step(rows, steps[-1]) for rows in records], "loss").tolist())
    return mean and Score(mean, steps[-1])


def _over_rows(group: Group, key: str, of: Callable[[np.ndarray], float], scale: float = 1) -> Score | None:
    """Of what each run logged."""
    logged = [column(run.metrics, key) for run in group.runs]
    mean = Mean.of([float(of(values)) * scale for values in logged if not np.isnan(values).all()])
    return mean and Score(mean, None)


def _result(group: Group, protocol: str, score: Callable[[dict[str, Any]], float]) -> Score | None:
    results = [results for run in group.runs if (results := run.results(protocol))]
    steps = {result["identity"]["step"] for result in results}
    mean = Mean.of([score(result) for result in results])
    return Score(mean, steps.pop()) if mean and len(steps) == 1 else None


def _measured(identity: dict[str, Any]) -> tuple[Any, ...]:
    return identity["shards_fingerprint"], identity.get("text_sha256"), identity["settings"]
