"""The values that the sections of a report share: the results of a run or model folder, and lines about them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tost_lm.files import sha256_file
from tost_lm.inference.evaluated import EvaluatedCheckpoint, read_result_file, results_path
from tost_lm.markdown import code


@dataclass(frozen=True)
class EvaluatedModel:
    """A run folder or model folder and its evaluation results. The checkpoint is found on first use."""

    folder: Path

    @cached_property
    def evaluated(self) -> EvaluatedCheckpoint:
        """The newest valid checkpoint. Raises CheckpointError if there is none."""
        return EvaluatedCheckpoint.find(self.folder)

    def results(self, task: str) -> dict[str, Any] | None:
        """The results of a task; None without any. Raises as `read_result_file`."""
        return read_result_file(results_path(self.folder, task))


def checkpoint_of(run: EvaluatedModel, results: dict[str, Any]) -> str:
    """The evaluated checkpoint, with a note if it is not the newest one."""
    identity = results["identity"]
    is_newest = identity["checkpoint_sha256"] == sha256_file(run.evaluated.checkpoint / "manifest.json")
    return identity["checkpoint"] + ("" if is_newest else " (not the newest checkpoint)")


def checkpoint_line(run: EvaluatedModel, results: dict[str, Any]) -> str:
    """The evaluated checkpoint, and the time that the evaluation took."""
    return f"Checkpoint {code(checkpoint_of(run, results))}, evaluated in {results['seconds']:,.0f} s."


def state_growth(results: dict[str, Any]) -> str:
    """How the size of a model's state depends on the number of tokens."""
    kept = results["kept_tokens"]
    if kept is None:
        return "it grows with every token (softmax attention)"
    if kept:
        return f"it grows up to the attention window of {kept:,} tokens"
    return "it is the same after any number of tokens"
