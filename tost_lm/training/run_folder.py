"""The folder of a run: the settings it was made with, its environment, its log and metrics."""

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
from tost_lm.files import read_rows, write_rows, write_whole
from tost_lm.model.checkpoint import find_checkpoint, step_folders
from tost_lm.training.config import PretrainConfig
from tost_lm.training.initial_weights import InitialWeights
from tost_lm.training.progress import Progress
from tost_lm.training.redaction import redact_command
from tost_lm.version import VERSION, git_commit

PACKAGES = ["torch", "deepspeed", "megatron-core", "sentencepiece", "numpy", "wandb"]


class Claim(NamedTuple):
    """How a launch takes up its run folder."""

    resume_from: Path | None
    """The newest valid checkpoint; None: the run begins."""
    restart_because: str = ""
    """Why the run that is in the folder is set aside first; empty: it is not."""
    seen: tuple[Path, ...] = ()
    """The checkpoints that were there."""
    initial_weights: InitialWeights | None = None
    """What a run that begins begins from; None: it draws its weights."""

    @property
    def weights_from(self) -> Path | None:
        """The checkpoint whose weights the launch starts with; None: it draws them."""
        return self.resume_from or (self.initial_weights and self.initial_weights.folder)


def claim_run_folder(config: PretrainConfig, shards_fingerprint: str, warn: Callable[[str], None] = print) -> Claim:
    """Find out how to take up the run folder; nothing is changed yet.

    Raises:
        ConfigError: the folder holds a run of other settings (a line for each), or something that is no run.
        CheckpointError: the run's checkpoints are all damaged, or were trained on other shards.
    With `run.if_changed = "restart"`, such a run is to be set aside instead.
    """
    folder = config.run_folder
    if not (folder / "config.toml").exists():
        # A hidden file is what an interrupted first launch left.
        if folder.exists() and (not folder.is_dir() or any(not file.name.startswith(".") for file in folder.iterdir())):
            raise ConfigError(f"{folder}: exists and is no run folder (it has no config.toml); choose another run.name")
        return Claim(None)
    seen = tuple(step_folders(folder))
    try:
        return Claim(_checkpoint_of_same_run(config, shards_fingerprint, warn), seen=seen)
    except (ConfigError, CheckpointError) as error:
        if config.run.if_changed == "refuse":
            raise
        return Claim(None, str(error), seen)


def require_as_claimed(config: PretrainConfig, claim: Claim) -> None:
    """Raises ConfigError when another launch, which had the folder until now, has left other checkpoints in it."""
    if tuple(step_folders(config.run_folder)) != claim.seen:
        raise ConfigError(f"{config.run_folder}: another launch went on with it meanwhile; start again")


def set_aside(config: PretrainConfig, claim: Claim) -> None:
    """Rename the folder of a run that is to be begun anew, and say so."""
    if claim.restart_because:
        folder = config.run_folder
        aside = folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        print(f"{claim.restart_because}\nso it is set aside as {aside}, and the run begins anew", flush=True)
        folder.rename(aside)


def _checkpoint_of_same_run(
    config: PretrainConfig, shards_fingerprint: str, warn: Callable[[str], None]
) -> Path | None:
    folder = config.run_folder
    recorded = load_config(PretrainConfig, folder / "config.toml")
    changed = differences(recorded.what_is_trained(), config.what_is_trained())
    if changed:
        lines = [f"{folder}: this run was made with other settings; choose another run.name or undo the change"]
        raise ConfigError("\n".join(lines + changed))
    if not step_folders(folder):
        return None
    checkpoint = find_checkpoint(folder, warn)
    if Progress.read(checkpoint).shards_fingerprint != shards_fingerprint:
        raise CheckpointError(
            f"{checkpoint}: was trained on other shards than {', '.join(map(str, config.data.folders))} holds now; "
            "choose another run.name"
        )
    return checkpoint


def write_run_folder(config: PretrainConfig, world_size: int, device: str) -> None:
    """Record the settings and the environment of this launch."""
    write_whole(config.run_folder / "config.toml", to_toml(config))
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
        "command": redact_command(sys.argv[1:]),
    }
    write_whole(config.run_folder / "env.json", json.dumps(environment, indent=1))


def drop_rows_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep the rows of a JSONL file up to `step`, so that a resumed run records no step twice; returns them."""
    kept = [row for row in read_rows(path) if row["step"] <= step]
    write_rows(path, kept)
    return kept


def step_folder(folder: Path, step: int) -> Path:
    """Where a run's checkpoint after `step` steps lies."""
    return folder / "checkpoints" / f"step_{step:08d}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
