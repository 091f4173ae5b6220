"""The report of several runs, section by section."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tost_lm.config import validate
from tost_lm.evaluation.report.analysis.memberships import memberships_of_groups, places_table
from tost_lm.evaluation.report.compared import position_curves_chart, step_chart
from tost_lm.evaluation.report.groups import Curve, Group, Mean, at_step, common_steps, curve, mean_curve, seed
from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.record import RunRecord
from tost_lm.evaluation.report.retrieval import of_groups as retrieval_of_groups
from tost_lm.evaluation.report.scores import FIGURES, Figure, Score, behind_the_best, limits
from tost_lm.model import ModelConfig
from tost_lm.model.flops import parameters

BAND = "Lines are means over the runs of a group at the steps that all of them have, bands their standard error."


def title(runs: Sequence[RunRecord]) -> str:
    return f"{len(runs)} runs compared"


def all_sections(groups: Sequence[Group], page: Page) -> Iterator[str]:
    """The whole text; a section whose data is not there is empty."""
    yield f"# {escape(page.title)}"
    yield members(groups)
    yield results(groups)
    yield seed_by_seed(groups)
    yield training_loss(groups, page)
    yield validation_loss(groups, page)
    yield loss_by_position(groups, page)
    yield retrieval_of_groups(groups)
    yield memberships_of_groups(groups)
    yield each_run(groups)
    yield page.whereabouts()


def members(groups: Sequence[Group]) -> str:
    """Which runs make a group, and the settings in which groups differ."""
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
        "Runs of a group were trained with the same settings but for the seed; how that was carried out (ranks, "
        "micro-batches, checkpoints) does not count. The columns are the settings in which groups differ, and how many "
        "numbers are trained, with those of learned positions among them.",
        table(("group", *paths, "parameters", "runs"), rows),
    ])  # fmt: skip


def results(groups: Sequence[Group]) -> str:
    """Means and standard errors, below what must be known to read them."""
    firsts = [(str(group.number), str(len(group.runs))) for group in groups]
    return "\n\n".join([
        "## Results",
        *[f"> {escape(limit)}" for limit in limits(groups)],
        _figures(("group", "runs"), firsts, groups),
        "Mean ± standard error over the runs of a group; a single run has none. Losses are in nats per token, the "
        "training loss that of one batch as logged. Speed is the median of what a run logged, memory the "
        "most (of tensors on a GPU, else of the process).",
    ])  # fmt: skip


def seed_by_seed(groups: Sequence[Group]) -> str:
    """How far the groups lie behind the best, of groups that were trained with the same seeds."""
    if not (behind := behind_the_best(groups)):
        return ""
    rows = [
        (group.label, str(behind[group.number].count), _mean(behind[group.number], ".4f"))
        for group in groups
        if group.number in behind
    ]
    return "\n\n".join([
        "## Seed by seed",
        "The last validation loss less that of the group with the lowest, run against run of the same seed, which read "
        "the same data in the same order.",
        table(("group", "seeds", "nats per token behind the best"), rows),
    ])  # fmt: skip


def training_loss(groups: Sequence[Group], page: Page) -> str:
    """By step."""
    curves = {group.label: mean_curve([run.metrics for run in group.runs], "loss") for group in groups}
    return _loss_section("Training loss", "loss", curves, page)


def validation_loss(groups: Sequence[Group], page: Page) -> str:
    """By step, of the runs that measured it."""
    curves = {group.label: mean_curve(_measured(group), "loss") for group in groups if _measured(group)}
    return _loss_section("Validation loss", "validation", curves, page)


def loss_by_position(groups: Sequence[Group], page: Page) -> str:
    """Of each group's last common measurement."""
    curves: dict[str, Curve] = {}
    for group in groups:
        if steps := common_steps(_measured(group)):
            rows = [at_step(rows, steps[-1]) for rows in _measured(group)]
            values_RP = np.array([row["loss_by_position"] for row in rows], dtype=float)
            curves[f"{group.label}, step {steps[-1]:,}"] = curve(rows[0]["position_ends"], values_RP)
    if not curves:
        return ""
    alternative = "Validation loss in nats per token by position in the document, a line for each group"
    picture = page.show("position", position_curves_chart(curves), alternative)
    return f"## Loss by position\n\n{picture}\n\n{places_table('group', 'positions up to', curves, '.3f')}"


def each_run(groups: Sequence[Group]) -> str:
    """What the means are made of, each run where it stands."""
    alone = [replace(group, runs=(run,)) for group in groups for run in group.runs]
    firsts = [(str(group.runs[0].folder), str(group.number), str(seed(group.runs[0]))) for group in alone]
    return f"## Each run\n\n{_figures(('run', 'group', 'seed'), firsts, alone)}"


def _parameters(group: Group) -> str:
    run = group.runs[0]
    counted = parameters(validate(ModelConfig, run.config["model"], where=str(run.folder / "config.toml")))
    return f"{counted.total:,}" + (f" ({counted.positions:,} of positions)" if counted.positions else "")


def _figures(header: Sequence[str], firsts: Sequence[tuple[str, ...]], groups: Sequence[Group]) -> str:
    """A table with a row for each group: what it begins with, the step it stands at, and what it has of FIGURES."""
    scores = {figure: [figure.of(group) for group in groups] for figure in FIGURES}
    shown = [figure for figure, found in scores.items() if any(found)]
    rows = []
    for i, (first, group) in enumerate(zip(firsts, groups, strict=True)):
        training = scores[FIGURES[0]][i]
        step = training.step if training else None
        cells = [_cell(figure, scores[figure][i], step, len(group.runs)) for figure in shown]
        rows.append((*first, "–" if step is None else f"{step:,}", *cells))
    return table((*header, "step", *[figure.name for figure in shown]), rows)


def _cell(figure: Figure, score: Score | None, step: int | None, runs: int) -> str:
    """The score, and in parentheses if it is of another step or of fewer runs."""
    if score is None:
        return "–"
    mean = score.mean
    text = _mean(mean, figure.form) if math.isfinite(mean.value) else "not a number"
    remarks = [f"step {score.step:,}"] if score.step not in (None, step) else []
    remarks += [f"{mean.count} of {runs} runs"] if mean.count < runs else []
    return f"{text} ({', '.join(remarks)})" if remarks else text


def _mean(mean: Mean, form: str) -> str:
    return f"{mean.value:{form}}" + ("" if mean.error is None else f" ± {mean.error:{form}}")


def _measured(group: Group) -> list[list[dict[str, Any]]]:
    return [run.validation for run in group.runs if run.validation]


def _loss_section(name: str, file: str, curves: Mapping[str, Curve], page: Page) -> str:
    drawn = {label: line for label, line in curves.items() if line.xs}
    if not drawn:
        return ""
    alternative = f"{name} in nats per token by step, a line for each group"
    return f"## {name}\n\n{page.show(file, step_chart(drawn, name.lower()), alternative)}\n\n{BAND}"
