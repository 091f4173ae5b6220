"""Sections of the report of several runs, the metrics that compare groups, and reasons why a comparison is limited."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tost_lm.config import validate
from tost_lm.intervals import wilson
from tost_lm.markdown import escape, format_chance, table, with_error
from tost_lm.model import ModelConfig
from tost_lm.model.flops import parameters
from tost_lm.page import Page, column
from tost_lm.report.record import Group, Mean, at_step, common_steps, loss_curve, seed
from tost_lm.report.training import loss_section, position_curve, position_section
from tost_lm.tasks.grid import GridTask
from tost_lm.tasks.registry import all_tasks
from tost_lm.tasks.task import Row, Task


class Metric(NamedTuple):
    """A column of the table of results."""

    name: str
    form: str
    """Format specification."""
    of: Callable[[Group], Mean | None]
    """None if no run has a value or the runs have values at different steps."""


def _last_validation_loss(group: Group) -> Mean | None:
    return _loss(_measured(group))


def compared_tasks() -> list[Task]:
    return [task for task in all_tasks() if task.column or isinstance(task, GridTask)]


def metrics() -> list[Metric]:
    """The columns, with those of tasks."""
    return [
        Metric("training loss", ".4f", lambda group: _loss([run.metrics for run in group.runs])),
        Metric("validation loss", ".4f", _last_validation_loss),
        *[Metric(*task.column, lambda group, task=task: _result(group, task)) for task in all_tasks() if task.column],
        Metric("tokens/s/device", ",.0f", lambda group: _over_rows(group, "tokens_per_second_device", np.nanmedian)),
        Metric("peak memory (GB)", ",.2f", lambda group: _over_rows(group, "memory_peak_bytes", np.nanmax, scale=1e-9)),
    ]


def gap_to_best(groups: Sequence[Group]) -> dict[int, Mean]:
    """Validation loss minus that of the best group, by group number, paired by seed.

    The pairs share the order of the data, which removes its effect. Empty unless two groups share seeds.
    """
    means = {group.number: mean.value for group in groups if (mean := _last_validation_loss(group))}
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
    for task in compared_tasks():
        identities = [results["identity"] for run in runs if (results := run.results(task.name))]
        if any(_inputs(identity) != _inputs(identities[0]) for identity in identities):
            yield f"The results of {task.name} are from different texts or settings."


def _limitations_within(group: Group) -> Iterator[str]:
    last = {run.folder: run.metrics[-1]["step"] for run in group.runs}
    if len(set(last.values())) > 1:
        listed = ", ".join(f"{name} at {step:,}" for name, step in last.items())
        steps = common_steps([run.metrics for run in group.runs])
        how = f"compared at their last common step {steps[-1]:,}" if steps else "not compared (no common step)"
        yield f"The runs of group {group.number} ended at different steps ({listed}) and are {how}."
    if len({seed(run) for run in group.runs}) < len(group.runs):
        yield f"Some runs of group {group.number} have the same seed, so the standard error is not over seeds."
    for task in compared_tasks():
        found = {run.folder: results["identity"]["step"] for run in group.runs if (results := run.results(task.name))}
        if len(set(found.values())) > 1:
            steps = ", ".join(f"{name} after {step:,}" for name, step in found.items())
            yield f"The results of {task.name} in group {group.number} have no mean: the steps differ ({steps})."


def _loss(records: Sequence[Sequence[dict[str, Any]]]) -> Mean | None:
    """Mean at the last common step."""
    steps = common_steps(records)
    if not steps:
        return None
    return Mean.of(column([at_step(rows, steps[-1]) for rows in records], "loss").tolist(), steps[-1])


def _over_rows(group: Group, key: str, of: Callable[[np.ndarray], float], scale: float = 1) -> Mean | None:
    """Mean over runs of a statistic of the logged values."""
    logged = [column(run.metrics, key) for run in group.runs]
    return Mean.of([float(of(values)) * scale for values in logged if not np.isnan(values).all()])


def _result(group: Group, task: Task) -> Mean | None:
    found = group.results(task.name)
    return Mean.of([task.cited(results) for results in found], found[0]["identity"]["step"]) if found else None


def _inputs(identity: dict[str, Any]) -> tuple[Any, ...]:
    return identity["shards_fingerprint"], identity.get("text_sha256"), identity["settings"]


def comparison_sections(groups: Sequence[Group], page: Page) -> Iterator[str]:
    """All sections, results and their picture first; a section without data is empty."""
    yield f"# {escape(page.title)}"
    yield results(groups)
    yield validation_loss(groups, page)
    yield paired_differences(groups)
    yield by_length(groups)
    yield training_loss(groups, page)
    yield loss_by_position(groups, page)
    yield group_members(groups)
    yield each_run(groups)
    yield page.figure_files()


def by_length(groups: Sequence[Group]) -> str:
    """Every task with lengths, with a column for each group; empty unless several runs have results."""
    tasks = [task for task in compared_tasks() if isinstance(task, GridTask)]
    runs = [run for group in groups for run in group.runs]
    if sum(any(run.results(task.name) for task in tasks) for run in runs) < 2:
        return ""
    rows = []
    for task in tasks:
        found = [group.results(task.name) for group in groups]
        scores = [[task.by_length(results) for results in of_group] for of_group in found]
        chances = [results["chance"] for of_group in found for results in of_group]
        for length in sorted({length for of_group in scores for of_run in of_group for length in of_run}):
            cells = [_mean_and_control([of[length] for of in of_group if length in of]) for of_group in scores]
            rows.append((task.name, f"{length:,}", format_chance(chances[0]), *cells))
    return "\n\n".join([
        "## Scores by length",
        "The cited score of each task: the mean, its 95 % interval over the texts of all runs (Wilson's), and for "
        "several runs the lowest and highest of them, which differ in the seed. The control asks for what is not in "
        "the text.",
        table(("task", "tokens", "chance", *[f"group {group.number}" for group in groups]), rows),
    ])  # fmt: skip


def _mean_and_control(scores: Sequence[Row]) -> str:
    if not scores:
        return "–"
    own, texts = (np.array([row[key] for row in scores]) for key in ("score", "samples"))
    controls = [row["control"] for row in scores if "control" in row]  # RULER has none
    control = f"; control {np.mean(controls):.1%}" if controls else ""
    seeds = f", seeds {own.min():.1%} to {own.max():.1%}" if len(scores) > 1 else ""
    low, high = wilson(own.mean(), texts.sum())
    return f"{own.mean():.1%} (texts {low:.1%} to {high:.1%}{seeds}{control})"


def group_members(groups: Sequence[Group]) -> str:
    """The runs of each group, and the settings in which the groups differ."""
    paths = list(dict.fromkeys(path for group in groups for path in group.settings))
    rows = [
        (
            str(group.number),
            *[str(group.settings.get(path, "–")) for path in paths],
            _parameters(group),
            ", ".join(str(run.folder) for run in group.runs),
        )
        for group in groups
    ]
    return "\n\n".join([
        "## Groups",
        "The runs of a group have the same settings, apart from the seed and settings that do not change the model "
        "(ranks, micro-batches, checkpoints). The columns are the settings in which the groups differ, and the number "
        "of trained parameters with learned positions.",
        table(("group", *paths, "parameters", "runs"), rows),
    ])  # fmt: skip


def results(groups: Sequence[Group]) -> str:
    """Limitations of the comparison, then means and standard errors."""
    firsts = [(group.label, str(len(group.runs))) for group in groups]
    return "\n\n".join([
        "## Results",
        *[f"> {escape(limitation)}" for limitation in limitations(groups)],
        metrics_table(("group", "runs"), firsts, groups),
        "Mean ± standard error over the runs of a group, so over seeds and not over texts, in figures at their common "
        f"steps; of accuracies the lowest and highest run. {UNITS}",
    ])  # fmt: skip


def paired_differences(groups: Sequence[Group]) -> str:
    """Loss differences to the best group, of groups with common seeds."""
    if not (gaps := gap_to_best(groups)):
        return ""
    rows = [
        (group.label, str(gap.count), with_error(gap.value, gap.error, ".4f"))
        for group in groups
        if (gap := gaps.get(group.number))
    ]
    return "\n\n".join([
        "## Differences paired by seed",
        "Last validation loss minus that of the best group, between runs of the same seed and so the same order of "
        "the data.",
        table(("group", "seeds", "nats per token above the best"), rows),
    ])  # fmt: skip


def training_loss(groups: Sequence[Group], page: Page) -> str:
    """Training loss by step."""
    curves = {group.label: loss_curve([run.metrics for run in group.runs]) for group in groups}
    return loss_section("Training loss", "loss", curves, page)


def validation_loss(groups: Sequence[Group], page: Page) -> str:
    """Validation loss by step."""
    curves = {group.label: loss_curve(_measured(group)) for group in groups if _measured(group)}
    return loss_section("Validation loss", "validation", curves, page)


def loss_by_position(groups: Sequence[Group], page: Page) -> str:
    """Validation loss by position at the last common measurement of each group."""
    curves = {}
    for group in groups:
        if steps := common_steps(_measured(group)):
            rows = [at_step(rows, steps[-1]) for rows in _measured(group)]
            curves[f"{group.label}, step {steps[-1]:,}"] = position_curve(rows)
    return position_section(curves, page)


def each_run(groups: Sequence[Group]) -> str:
    """The metrics of each run at its own last step."""
    alone = [replace(group, runs=(run,)) for group in groups for run in group.runs]
    firsts = [(str(group.runs[0].folder), str(group.number), str(seed(group.runs[0]))) for group in alone]
    return f"## Individual runs\n\n{metrics_table(('run', 'group', 'seed'), firsts, alone)}"


def _parameters(group: Group) -> str:
    run = group.runs[0]
    counted = parameters(validate(ModelConfig, run.config["model"], where=str(run.folder / "config.toml")))
    return f"{counted.total:,}" + (f" ({counted.positions:,} in positions)" if counted.positions else "")


UNITS = (
    "Losses are in nats per token; the training loss is that of the last logged batch. Throughput is the median over "
    "the logged rows of a run, memory the maximum (of tensors on a GPU, otherwise of the process)."
)


def metrics_table(header: Sequence[str], firsts: Sequence[tuple[str, ...]], groups: Sequence[Group]) -> str:
    """A table with a row for each group: its first cells, its step, and the metrics that any group has."""
    columns = metrics()
    means = {metric: [metric.of(group) for group in groups] for metric in columns}
    shown = [metric for metric, found in means.items() if any(found)]
    rows = []
    for i, (first, group) in enumerate(zip(firsts, groups, strict=True)):
        training = means[columns[0]][i]
        step = training.step if training else None
        cells = [_cell(metric, means[metric][i], step, len(group.runs)) for metric in shown]
        rows.append((*first, "–" if step is None else f"{step:,}", *cells))
    return table((*header, "step", *[metric.name for metric in shown]), rows)


def _cell(metric: Metric, mean: Mean | None, step: int | None, runs: int) -> str:
    """The mean; parentheses note another step or fewer runs."""
    if mean is None:
        return "–"
    if not math.isfinite(mean.value):
        text = "NaN"
    elif metric.form.endswith("%") and mean.count > 1:  # equal scores of few texts would have a standard error of 0
        text = f"{mean.value:{metric.form}}, seeds {mean.low:{metric.form}} to {mean.high:{metric.form}}"
    else:
        text = with_error(mean.value, mean.error, metric.form)
    remarks = [f"step {mean.step:,}"] if mean.step not in (None, step) else []
    remarks += [f"{mean.count} of {runs} runs"] if mean.count < runs else []
    return f"{text} ({', '.join(remarks)})" if remarks else text


def _measured(group: Group) -> list[list[dict[str, Any]]]:
    return [run.validation for run in group.runs if run.validation]
