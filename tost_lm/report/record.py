"""Records and results of a run folder or model folder, read without torch; and groups of runs that differ only in the
seed, with means and standard errors over the runs of a group.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from tost_lm.checkpointing.format import MANIFEST
from tost_lm.checkpointing.run_folder import read_record
from tost_lm.config import leaves, read_toml
from tost_lm.errors import ConfigError
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.page import column
from tost_lm.redaction import redact_text
from tost_lm.tasks.evaluated_model import EvaluatedModel


@dataclass(frozen=True)
class RunRecord(EvaluatedModel):
    """Settings and records of a run folder."""

    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Raises ConfigError if `folder` is not a run folder, or a row of its records is damaged."""
        if (folder / MANIFEST).is_file():
            raise ConfigError(f"not a run folder but a checkpoint: {folder}; give the run folder that contains it")
        if not (folder / "config.toml").is_file():
            raise ConfigError(f"not a run folder, config.toml is missing: {folder}; give a folder that training wrote")
        return cls(
            folder=folder,
            config=read_toml(folder / "config.toml"),
            metrics=read_record(folder / "metrics.jsonl"),
            validation=read_record(folder / "validation.jsonl"),
            events=read_record(folder / "events.jsonl"),
        )


def is_export(folder: Path) -> bool:
    """Whether `folder` is a checkpoint outside of a run. Raises CheckpointError if it is damaged."""
    return (folder / MANIFEST).is_file() and EvaluatedCheckpoint.find(folder).home == folder


IGNORED = {
    "validation", "evaluation", "launch", "parallel", "memory", "checkpoint", "run", "train.micro_batch_size",
    "data.workers", "model.plugins",
}  # fmt: skip
"""Sections and settings that do not change the trained model."""
LABEL_CHARACTERS = 60


@dataclass(frozen=True)
class Group:
    """Runs with the same settings, apart from the seed and the `IGNORED` settings."""

    number: int
    runs: tuple[RunRecord, ...]
    settings: dict[str, Any]
    """By path, the settings in which the groups differ; unset ones are left out."""

    @property
    def label(self) -> str:
        """Number and shortened settings, for legends."""
        settings = ", ".join(f"{path}={value}" for path, value in self.settings.items())
        return (
            shorten(f"{self.number}: {settings}", LABEL_CHARACTERS, placeholder=" …") if settings else f"{self.number}"
        )

    def results(self, task: str) -> list[dict[str, Any]]:
        """Results of the runs; none if their steps or settings differ, because then a mean has no meaning."""
        found = [results for run in self.runs if (results := run.results(task))]
        alike = {str([results["identity"][key] for key in ("step", "settings")]) for results in found}
        return found if len(alike) == 1 else []


@dataclass(frozen=True)
class Curve:
    """The mean over runs at the xs that all of them have."""

    xs: list[int]
    mean: np.ndarray
    error: np.ndarray | None
    """Standard error of the mean; None for a single run."""


@dataclass(frozen=True)
class Mean:
    """A mean over `count` runs; `error` is its standard error, None for a single run."""

    value: float
    low: float
    """Of the runs, as `high`."""
    high: float
    error: float | None
    count: int
    step: int | None = None
    """Step of the measurement; None if it has none."""

    @classmethod
    def of(cls, values: Sequence[float], step: int | None = None) -> "Mean | None":
        """None if there are no values."""
        if not values:
            return None
        error = float(_standard_error(np.array(values))) if len(values) > 1 else None
        return cls(float(np.mean(values)), min(values), max(values), error, len(values), step)


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """The runs to compare. Raises ConfigError for a folder that is not a run, has no metrics or is listed twice."""
    runs, seen = [], set()
    for folder in folders:
        if folder.resolve() in seen:
            raise ConfigError(f"a run is listed twice: {folder}; list each run once")
        seen.add(folder.resolve())
        run = RunRecord.read(folder)
        if not run.metrics:
            raise ConfigError(f"a run has no metrics: {folder}/metrics.jsonl; train it first or leave it out")
        runs.append(run)
    return runs


def group_runs(runs: Iterable[RunRecord]) -> list[Group]:
    """The groups in the order of their first runs."""
    members: list[tuple[dict[str, Any], list[RunRecord]]] = []
    for run in runs:
        compared = compared_settings(run.config)
        same = next((others for settings, others in members if settings == compared), None)
        if same is None:
            members.append((compared, [run]))
        else:
            same.append(run)
    paths = dict.fromkeys(path for settings, _ in members for path in settings)
    differing = [path for path in paths if any(s.get(path) != members[0][0].get(path) for s, _ in members)]
    return [
        Group(number, tuple(runs), {path: settings[path] for path in differing if path in settings})
        for number, (settings, runs) in enumerate(members, start=1)
    ]


def compared_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that define a group, by path: those of the trained model, without the seed.

    Of the checkpoint of a branch only its step counts, because runs with other seeds branch from other trunks.
    """
    return {
        path: _shown_setting(path, value)
        for path, value in leaves(dict(config))
        if path.split(".")[0] not in IGNORED and path not in IGNORED and path != "train.seed"
    }


def _shown_setting(path: str, value: Any) -> Any:
    if path == "train.branch_from":
        return Path(value).name
    return redact_text(value) if isinstance(value, str) else value


def seed(run: RunRecord) -> int:
    return run.config["train"].get("seed", 0)


def common_steps(records: Sequence[Sequence[Mapping[str, Any]]]) -> list[int]:
    """The steps that all lists of rows have."""
    return sorted(set.intersection(*({row["step"] for row in rows} for rows in records))) if records else []


def at_step(rows: Iterable[Mapping[str, Any]], step: int) -> Mapping[str, Any]:
    return next(row for row in rows if row["step"] == step)


def loss_curve(records: Sequence[Sequence[Mapping[str, Any]]]) -> Curve:
    """The mean loss over runs at their common steps; NaN where a run lacks it."""
    steps = common_steps(records)
    wanted = set(steps)
    values_RS = np.array([column([row for row in rows if row["step"] in wanted], "loss") for rows in records])
    return curve(steps, values_RS)


def curve(xs: Sequence[int], values_RX: np.ndarray) -> Curve:
    """The mean over runs of values [runs, xs]."""
    error = _standard_error(values_RX) if len(values_RX) > 1 else None
    return Curve(list(xs), values_RX.mean(axis=0), error)


def _standard_error(values: np.ndarray) -> np.ndarray:
    """Standard error of the mean over the first dimension."""
    return values.std(axis=0, ddof=1) / len(values) ** 0.5
