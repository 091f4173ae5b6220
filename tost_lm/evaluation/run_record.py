"""What a run folder says of itself, read without torch for the report."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tost_lm.config import read_toml
from tost_lm.errors import ConfigError
from tost_lm.evaluation.subject import Subject
from tost_lm.files import read_rows


@dataclass(frozen=True)
class RunRecord:
    """A run folder with its newest valid checkpoint, read whole."""

    folder: Path
    subject: Subject
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    parameters: int
    """Parameters without the learned positions, the way the published figures are counted."""

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Raises ConfigError if it is no run folder, CheckpointError if it has no valid checkpoint."""
        if not (folder / "config.toml").is_file():
            raise ConfigError(f"{folder}: not a run folder (it has no config.toml); give one that training made")
        subject = Subject.find(folder)
        return cls(
            folder=folder,
            subject=subject,
            config=read_toml(folder / "config.toml"),
            environment=_read_json(folder / "env.json") or {},
            metrics=read_rows(folder / "metrics.jsonl"),
            parameters=_count_parameters(subject.checkpoint / "model.safetensors"),
        )

    @property
    def step(self) -> int:
        """Steps behind the checkpoint."""
        return int(self.subject.checkpoint.name.removeprefix("step_"))

    @property
    def tokens(self) -> int:
        """Tokens trained on, up to the checkpoint."""
        train = self.config["train"]
        return self.step * train["batch_sequences"] * train["sequence_tokens"]

    def results(self, protocol: str) -> dict[str, Any] | None:
        """A protocol's results, None if it was not evaluated."""
        path = self.subject.results_path(protocol)
        results = _read_json(path)
        if results is not None and "identity" not in results:
            raise ConfigError(f"{path}: no results of this version; remove it and run the program that makes it again")
        return results


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise ConfigError(f"{path}: damaged; remove it and run the program that makes it again") from None


def _count_parameters(weights: Path) -> int:
    from math import prod

    from safetensors import safe_open

    with safe_open(weights, framework="np") as file:
        names = set(file.keys()) - {"positions.weight"}
        return sum(prod(file.get_slice(name).get_shape()) for name in names)
