"""Several runs grouped by what they train, and the mean and standard error over the seeds of a group."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from tost_lm.config.section import leaves
from tost_lm.errors import ConfigError
from tost_lm.evaluation.report.charts import column
from tost_lm.evaluation.report.record import RunRecord

CARRIED_OUT = {"validation", "parallel", "checkpoint", "run", "train.micro_batch_sequences", "data.workers"}
"""Sections and settings that change nothing about what is trained."""
LABEL_CHARACTERS = 60


@dataclass(frozen=True)
class Group:
    """Runs whose settings are equal but for the seed and what only says how the work is carried out."""

    number: int
    runs: tuple[RunRecord, ...]
    settings: dict[str, Any]
    """By their path, those in which the groups differ; one that is not set is not there."""

    @property
    def label(self) -> str:
        """For legends: the number, and what fits of the settings."""
        settings = ", ".join(f"{path}={value}" for path, value in self.settings.items())
        return (
            shorten(f"{self.number}: {settings}", LABEL_CHARACTERS, placeholder=" …") if settings else f"{self.number}"
        )


@dataclass(frozen=True)
class Curve:
    """The mean of a value over runs, at the places xs that all of them have."""

    xs: list[int]
    mean: np.ndarray
    error: np.ndarray | None
    """Standard error of the mean; None: there is one run."""


@dataclass(frozen=True)
class Mean:
    """A mean over `count` runs with its standard error; one run has none."""

    value: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Mean | None":
        """Of the runs that have the value; None: no run has."""
        there = np.array([value for value in values if value is not None])
        if not len(there):
            return None
        error = float(_standard_error(there)) if len(there) > 1 else None
        return cls(float(there.mean()), error, len(there))


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """The runs to compare. Raises ConfigError for one that is no run, has no metrics or is there twice."""
    runs, seen = [], set()
    for folder in folders:
        if folder.resolve() in seen:
            raise ConfigError(f"{folder}: is there twice; give each run once")
        seen.add(folder.resolve())
        run = RunRecord.read(folder)
        if not run.metrics:
            raise ConfigError(f"{folder}: has no metrics yet (metrics.jsonl); train it first or leave it out")
        runs.append(run)
    return runs


def grouped(runs: Iterable[RunRecord]) -> list[Group]:
    """The runs by what they train, in the order of their first."""
    members: list[tuple[dict[str, Any], list[RunRecord]]] = []
    for run in runs:
        trained = what_is_trained(run.config)
        same = next((others for settings, others in members if settings == trained), None)
        if same is None:
            members.append((trained, [run]))
        else:
            same.append(run)
    paths = dict.fromkeys(path for settings, _ in members for path in settings)
    differing = [path for path in paths if any(s.get(path) != members[0][0].get(path) for s, _ in members)]
    return [
        Group(number, tuple(runs), {path: settings[path] for path in differing if path in settings})
        for number, (settings, runs) in enumerate(members, start=1)
    ]


def what_is_trained(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what is trained, by their path, but for the seed."""
    return {
        path: value
        for path, value in leaves(dict(config))
        if path.split(".")[0] not in CARRIED_OUT and path not in CARRIED_OUT and path != "train.seed"
    }


def seed(run: RunRecord) -> int:
    return run.config["train"].get("seed", 0)


def common_steps(records: Sequence[Sequence[Mapping[str, Any]]]) -> list[int]:
    """The steps that every one of these lists of rows has."""
    return sorted(set.intersection(*({row["step"] for row in rows} for rows in records))) if records else []


def at_step(rows: Iterable[Mapping[str, Any]], step: int) -> Mapping[str, Any]:
    return next(row for row in rows if row["step"] == step)


def mean_curve(records: Sequence[Sequence[Mapping[str, Any]]], key: str) -> Curve:
    """A value of rows by step, over runs, at their common steps; not a number where it is none in one run."""
    steps = common_steps(records)
    wanted = set(steps)
    values_RS = np.array([column([row for row in rows if row["step"] in wanted], key) for rows in records])
    return curve(steps, values_RS)


def curve(xs: Sequence[int], values_RX: np.ndarray) -> Curve:
    """The mean over runs of values [runs, places]."""
    error = _standard_error(values_RX) if len(values_RX) > 1 else None
    return Curve(list(xs), values_RX.mean(axis=0), error)


def _standard_error(values: np.ndarray) -> np.ndarray:
    """Over the first dimension: the sample's deviation by the root of its size."""
    return values.std(axis=0, ddof=1) / len(values) ** 0.5
