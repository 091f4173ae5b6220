"""What a run folder or an export says of itself, read without torch for the report."""

import json
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from tost_lm.config import read_toml
from tost_lm.errors import ConfigError
from tost_lm.evaluation.subject import HELDOUT, Subject, results_path
from tost_lm.files import read_rows
from tost_lm.model.checkpoint import MANIFEST, StoredTensors


@dataclass(frozen=True)
class Evaluated:
    """A run folder or an export, and what was measured of it; its checkpoint is looked for when asked for."""

    folder: Path

    @cached_property
    def subject(self) -> Subject:
        """The newest valid checkpoint. Raises CheckpointError if there is none."""
        return Subject.find(self.folder)

    @property
    def with_text(self) -> str:
        """What a program that reads held-out text is given."""
        return f"{self.folder} heldout.shards=FOLDER"

    def named_protocols(self) -> dict[str, dict[str, Any]]:
        """Results of `eval.zero_shot` on test sets, by protocol."""
        names = sorted(path.parent.name for path in self.folder.glob("eval/*@*/results.json"))
        found = {name: self.results(name) or {} for name in names}
        return {name: results for name, results in found.items() if "headline" in results and name != HELDOUT}

    def results(self, protocol: str) -> dict[str, Any] | None:
        """A protocol's results, None if it was not evaluated."""
        path = results_path(self.folder, protocol)
        results = _read_json(path)
        if results is not None and "identity" not in results:
            raise ConfigError(f"{path}: no results of this version; remove it and run the program that makes it again")
        return results


@dataclass(frozen=True)
class RunRecord(Evaluated):
    """A run folder's settings and records."""

    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Raises ConfigError if it is no run folder."""
        if (folder / MANIFEST).is_file():
            raise ConfigError(f"{folder}: not a run folder but a checkpoint; give the run folder that it lies in")
        if not (folder / "config.toml").is_file():
            raise ConfigError(f"{folder}: not a run folder (it has no config.toml); give one that training made")
        return cls(
            folder=folder,
            config=read_toml(folder / "config.toml"),
            environment=_read_json(folder / "env.json") or {},
            metrics=read_rows(folder / "metrics.jsonl"),
            validation=read_rows(folder / "validation.jsonl"),
            events=read_rows(folder / "events.jsonl"),
        )

    @property
    def with_text(self) -> str:
        return super().with_text if "mixture" in self.config["data"] else str(self.folder)

    @cached_property
    def parameters(self) -> int:
        """Parameters without the learned positions, the way the published figures are counted."""
        weights = StoredTensors(self.subject.checkpoint, "model", framework="np")
        return sum(prod(weights.shape(name)) for name in weights if name != "positions.weight")

    @property
    def step(self) -> int:
        """Steps behind the checkpoint."""
        return int(self.subject.checkpoint.name.removeprefix("step_"))

    @property
    def tokens(self) -> int:
        """Tokens trained on, up to the checkpoint."""
        train = self.config["train"]
        return self.step * train["batch_sequences"] * train["sequence_tokens"]


def is_export(folder: Path) -> bool:
    """Whether it is a checkpoint that belongs to no run. Raises CheckpointError if it is a damaged one."""
    return (folder / MANIFEST).is_file() and Subject.find(folder).home == folder


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise ConfigError(f"{path}: damaged; remove it and run the program that makes it again") from None
