"""The run folder: where a launch starts, its recorded settings and environment, and its rows of metrics."""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.config import differences, load_config, to_toml
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.files import read_rows, write_atomically, write_rows
from tost_lm.model.checkpoint import find_checkpoint, step_folders, verify_checkpoint
from tost_lm.training.branch import require_same_rates
from tost_lm.training.config import PretrainConfig
from tost_lm.training.initial_weights import InitialWeights
from tost_lm.training.progress import Progress
from tost_lm.training.redaction import redact_command
from tost_lm.version import VERSION, git_commit

FLIGHT_RECORDER = "flight_recorder"
MAY_CHANGE = {"train.steps", "optim.warmup_steps"}
"""Settings that may change if the learning rates of the steps so far do not."""
PACKAGES = ["torch", "deepspeed", "megatron-core", "sentencepiece", "numpy", "wandb"]


class StartPoint(NamedTuple):
    """What a launch starts from."""

    resume_from: Path | None
    """The newest valid checkpoint; None: the run starts from step 0."""
    restart_reason: str = ""
    """Why the old run in the folder is renamed first; empty: it is not."""
    checkpoints: tuple[Path, ...] = ()
    """The checkpoints that the folder had when this was determined."""
    initial_weights: InitialWeights | None = None
    """Of a run that starts from step 0; None: they are drawn at random."""

    @property
    def weights_from(self) -> Path | None:
        """The checkpoint that has the first weights of the launch; None: they are drawn at random."""
        return self.resume_from or (self.initial_weights and self.initial_weights.folder)


def _of_an_ended_first_launch(path: Path) -> bool:
    """Whether a launch that ended before it wrote its settings may have left this."""
    return path.name.startswith(".") or path.name == FLIGHT_RECORDER


def find_start_point(
    config: PretrainConfig,
    fingerprint: str,
    warn: Callable[[str], None] = print,
    verify: Callable[[Path], None] = verify_checkpoint,
) -> StartPoint:
    """Determine what a launch on shards of this fingerprint starts from; nothing is changed.

    `verify` raises CheckpointError for a damaged checkpoint, which is skipped with a message to `warn`.

    Raises:
        ConfigError: the folder is not a run folder, its run has other settings (a line for each), or other learning
            rates so far.
        CheckpointError: all checkpoints of the run are damaged, or were trained on other shards.
    With `run.on_config_change = "restart"` only a folder that is not a run folder raises.
    """
    folder = config.run_folder
    if not (folder / "config.toml").exists():
        if folder.exists() and not (folder.is_dir() and all(map(_of_an_ended_first_launch, folder.iterdir()))):
            raise ConfigError(f"{folder}: exists and is not a run folder (no config.toml); choose another run.name")
        return StartPoint(None)
    checkpoints = tuple(step_folders(folder))
    try:
        return StartPoint(_checkpoint_of_same_run(config, fingerprint, warn, verify), checkpoints=checkpoints)
    except (ConfigError, CheckpointError) as error:
        if config.run.on_config_change == "refuse":
            raise
        return StartPoint(None, str(error), checkpoints)


def require_same_checkpoints(config: PretrainConfig, start: StartPoint) -> None:
    """Raises ConfigError when another launch has changed the checkpoints since `find_start_point`."""
    if tuple(step_folders(config.run_folder)) != start.checkpoints:
        raise ConfigError(f"{config.run_folder}: another launch has changed its checkpoints; run the command again")


def rename_old_run(config: PretrainConfig, start: StartPoint) -> None:
    """Rename the run folder if the run restarts, and print the reason."""
    if start.restart_reason:
        folder = config.run_folder
        renamed = folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        print(f"{start.restart_reason}\nrenamed {folder} to {renamed}; the run restarts", flush=True)
        folder.rename(renamed)


def _checkpoint_of_same_run(
    config: PretrainConfig, fingerprint: str, warn: Callable[[str], None], verify: Callable[[Path], None]
) -> Path | None:
    folder = config.run_folder
    recorded = load_config(PretrainConfig, folder / "config.toml")
    changed = differences(recorded.what_is_trained(), config.what_is_trained())
    if {line.partition(":")[0] for line in changed} - MAY_CHANGE:
        lines = [f"{folder}: this run has other settings; choose another run.name or undo the change"]
        raise ConfigError("\n".join(lines + changed))
    if not step_folders(folder):
        return None
    checkpoint = find_checkpoint(folder, warn, verify)
    progress = Progress.read(checkpoint)
    require_same_rates(recorded, config, progress.step, f"{folder}: {', '.join(changed)}", folder)
    if progress.shards_fingerprint != fingerprint:
        raise CheckpointError(
            f"{checkpoint}: was trained on other shards than those in {', '.join(map(str, config.data.folders))}; "
            "choose another run.name"
        )
    return checkpoint


def write_run_folder(config: PretrainConfig, world_size: int, device: str) -> None:
    """Record the settings and the environment of this launch."""
    write_atomically(config.run_folder / "config.toml", to_toml(config))
    environment = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "tost_lm": VERSION,
        "commit": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": device,
        "cpu_count": os.cpu_count(),
        "world_size": world_size,
        "command": ["tost", "train", *redact_command(sys.argv[1:])],
    }
    write_atomically(config.run_folder / "env.json", json.dumps(environment, indent=1))


def drop_rows_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep the rows of a JSONL file up to `step`, so that a resumed run records no step twice; returns them."""
    kept = [row for row in read_rows(path) if row["step"] <= step]
    write_rows(path, kept)
    return kept


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
