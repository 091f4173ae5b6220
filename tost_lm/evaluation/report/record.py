"""Records and results of a run folder or model folder, read without torch."""

import json
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from tost_lm.checkpointing.format import MANIFEST, StoredTensors
from tost_lm.config import read_toml
from tost_lm.errors import ConfigError
from tost_lm.evaluation.subject import HELDOUT, Subject, results_path
from tost_lm.files import read_rows


@dataclass(frozen=True)
class EvaluatedModel:
    """A run folder or model folder and its evaluation results. The checkpoint is found on first use."""

    folder: Path

    @cached_property
    def subject(self) -> Subject:
        """The newest valid checkpoint. Raises CheckpointError if there is none."""
        return Subject.find(self.folder)

    @property
    def arguments(self) -> str:
        """Arguments for a program that reads held-out text."""
        return f"{self.folder} heldout.shards=FOLDER"

    def named_protocols(self) -> dict[str, dict[str, Any]]:
        """Results of `tost eval zero-shot` on test sets by protocol."""
        names = sorted(path.parent.name for path in self.folder.glob("eval/*@*/results.json"))
        found = {name: self.results(name) or {} for name in names}
        return {name: results for name, results in found.items() if "headline" in results and name != HELDOUT}

    def results(self, protocol: str) -> dict[str, Any] | None:
        """The results of a protocol; None without any."""
        path = results_path(self.folder, protocol)
        results = _read_json(path)
        if results is not None and "identity" not in results:
            raise ConfigError(f"results are from another version: {path}; remove the file and run the evaluation again")
        return results


@dataclass(frozen=True)
class RunRecord(EvaluatedModel):
    """Settings and records of a run folder."""

    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Raises ConfigError if `folder` is not a run folder."""
        if (folder / MANIFEST).is_file():
            raise ConfigError(f"not a run folder but a checkpoint: {folder}; give the run folder that contains it")
        if not (folder / "config.toml").is_file():
            raise ConfigError(f"not a run folder, config.toml is missing: {folder}; give a folder that training wrote")
        return cls(
            folder=folder,
            config=read_toml(folder / "config.toml"),
            environment=_read_json(folder / "env.json") or {},
            metrics=read_rows(folder / "metrics.jsonl"),
            validation=read_rows(folder / "validation.jsonl"),
            events=read_rows(folder / "events.jsonl"),
        )

    @property
    def branch(self) -> dict[str, Any] | None:
        """The event with which this run started as a branch; None: it is no branch."""
        return _branched(self.events)

    def branches(self) -> list["RunRecord"]:
        """The runs beside this one that branched from its checkpoints, in the order of their steps and names."""
        here = self.folder.resolve()
        found = []
        for path in here.parent.glob("*/events.jsonl"):
            event = _branched(read_rows(path))
            if event and Path(event["folder"]).parts[-3:-1] == (here.name, "checkpoints"):
                found.append((event["step"], path.parent.name, self.folder.parent / path.parent.name))
        return [RunRecord.read(folder) for *_, folder in sorted(found)]

    @property
    def arguments(self) -> str:
        return super().arguments if "mixture" in self.config["data"] else str(self.folder)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters without learned positions, as published numbers count them."""
        weights = StoredTensors(self.subject.checkpoint, "model", framework="np")
        return sum(prod(weights.shape(name)) for name in weights if name != "positions.weight")

    @property
    def step(self) -> int:
        """Training steps of the checkpoint."""
        return int(self.subject.checkpoint.name.removeprefix("step_"))

    @property
    def tokens(self) -> int:
        """Training tokens of the checkpoint."""
        train = self.config["train"]
        return self.step * train["global_batch_size"] * train["seq_len"]


def is_export(folder: Path) -> bool:
    """Whether `folder` is a checkpoint outside of a run. Raises CheckpointError if it is damaged."""
    return (folder / MANIFEST).is_file() and Subject.find(folder).home == folder


def _branched(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] == "branched"), None)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise ConfigError(f"damaged JSON: {path}; remove the file and run the program that writes it again") from None
