"""The run folder: its layout, and the checkpoints that stay in it.

    config.toml, env.json               settings and environment of the newest launch
    log.txt, metrics.jsonl, …           records of training
    checkpoints/step_00001000/          a checkpoint; names of incomplete ones begin with a point
    heartbeats/, flight_recorder/       of the watchdog and of torch, for each rank
    profile/, wandb/, tensorboard/      traces, and the records as loggers show them
    eval/TASK/results.json              results of evaluations

The file that a launch locks is beside the folder: see `run_lock.py`.
"""

import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tost_lm.checkpointing.format import GIVE, MANIFEST, Progress, verify_checkpoint
from tost_lm.checkpointing.settings import CheckpointConfig
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.files import read_rows
from tost_lm.remote import RemotePath, list_files, local_copy

ADAPTER = "adapter_config.json"
FOREIGN_FOLDERS = {
    ADAPTER: "adapters (LoRA) are not read; merge them into their model with merge_and_unload of peft, then "
    "convert the merged folder",
    "config.json": "it is a folder of the Hugging Face library; convert it with tost convert",
}
"""By a file of a model folder of other libraries, why it is no checkpoint and what to do."""
CHECKPOINTS, ENVIRONMENT, FLIGHT_RECORDER, HEARTBEATS = "checkpoints", "env.json", "flight_recorder", "heartbeats"


COLUMNS = {
    "metrics": ("step", "loss", "tokens", "seconds"),
    "validation": ("step", "loss", "tokens", "position_ends", "loss_by_position"),
    "evaluations": ("step", "protocol", "headline", "data_sha256"),
    "events": ("step", "event"),
}
"""What each row of a record has. Each record has its own JSONL file."""


def read_record(path: Path) -> list[dict[str, Any]]:
    """The rows of a record, as `read_rows`. Raises ConfigError if one lacks a column."""
    rows = read_rows(path)
    for number, row in enumerate(rows, start=1):
        found = row if isinstance(row, dict) else {}
        if missing := [name for name in COLUMNS[path.stem] if name not in found]:
            raise ConfigError(f"{path}, line {number}: damaged: has no {missing[0]}; correct or remove the line")
    return rows


def step_folder(run_folder: Path, step: int) -> Path:
    """The folder of a run's checkpoint after `step` steps."""
    return run_folder / CHECKPOINTS / f"step_{step:08d}"


def step_folders(run_folder: Path) -> list[Path]:
    """The checkpoints of a run, valid or not, oldest first; at a URL those that are complete. Raises StorageError."""
    folder = run_folder / CHECKPOINTS
    if isinstance(folder, RemotePath):
        files = list_files(folder, deep=True)
        return sorted(
            folder / name for name in {name.partition("/")[0] for name in files} if f"{name}/{MANIFEST}" in files
        )
    return sorted(folder.glob("step_" + "[0-9]" * 8))


def step_of(checkpoint: Path) -> int | None:
    """The step that a step folder is named after; None: it is another folder."""
    found = re.fullmatch(r"step_(\d{8})", checkpoint.name)
    return int(found[1]) if found else None


def find_checkpoint(
    path: Path, warn: Callable[[str], None] = print, verify: Callable[[Path], None] = verify_checkpoint
) -> Path:
    """The checkpoint folder of `path`: a step folder or export itself, or the newest valid checkpoint of a run folder.

    Of a URL it is a copy in the cache. Damaged checkpoints of a run folder are skipped with a message to `warn`;
    `verify` raises CheckpointError for them.

    Raises:
        CheckpointError: there is no valid checkpoint.
    """
    if isinstance(path, RemotePath):
        path = path if step_folders(path) else local_copy(path, _verify_model)
    elif not path.exists():
        raise CheckpointError(f"{path}: no such folder; {GIVE}")
    elif path.is_file():
        raise CheckpointError(f"{path}: a file, which is not read because pickles run code; {GIVE}")
    if (path / MANIFEST).is_file():
        verify(path)
        return path
    if newest := next(_valid_steps(path, warn, verify), None):
        return newest
    if foreign := [reason for file, reason in FOREIGN_FOLDERS.items() if (path / file).is_file()]:
        raise CheckpointError(f"{path}: not a checkpoint: {foreign[0]}")
    reason = "none of its checkpoints is valid" if step_folders(path) else "it holds no checkpoint"
    raise CheckpointError(f"{path}: not a checkpoint: {reason}; {GIVE}")


def local_model(path: Path) -> Path:
    """A local path itself; of a URL, a copy in the cache: a run's newest valid checkpoint, or any model's folder or
    file.

    Raises:
        CheckpointError: as `find_checkpoint`.
        StorageError: the storage cannot be reached, or refuses; or there is no such file.
    """
    is_run = isinstance(path, RemotePath) and step_folders(path)
    return find_checkpoint(path) if is_run else local_copy(path, _verify_model)


def _verify_model(copy: Path) -> None:
    if (copy / MANIFEST).is_file():  # not of the Hugging Face library
        verify_checkpoint(copy)


def _valid_steps(run_folder: Path, warn: Callable[[str], None], verify: Callable[[Path], None]) -> Iterator[Path]:
    """The step folders that `verify` accepts, newest first."""
    for step in reversed(step_folders(run_folder)):
        try:
            folder = local_copy(step, verify_checkpoint)
            verify(folder)
            yield folder
        except CheckpointError as error:
            warn(f"skipped checkpoint: {error}")


def prune(newest: Path, settings: CheckpointConfig) -> None:
    """Delete the remains of interrupted saves, and the checkpoints up to `newest` that `settings` does not keep. The
    lowest validation loss is that of its stage.

    Checkpoints after `newest` are damaged, because the run resumed from an earlier one; they do not count.
    """
    folders = [folder for folder in step_folders(newest.parent.parent) if folder.name <= newest.name]
    kept = kept_folders(folders, settings)
    for folder in folders:
        if folder not in kept:
            folder.rename(folder.with_name(f".{folder.name}.gone"))  # no reader sees a half-deleted folder
    for leftover in newest.parent.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)  # on NFS an open file stays until the next call


def kept_folders(
    folders: Sequence[Path], settings: CheckpointConfig, read: Callable[[Path], Progress] = Progress.read
) -> set[Path]:
    """Those of the checkpoints of a run, oldest first, that `settings` keeps. `read` reads their progress."""
    kept = {*folders[-settings.keep_latest_k :]}
    if retain := settings.retain_interval:
        kept |= {folder for folder in folders if (step_of(folder) or 0) % retain == 0}
    begun = max((stage.first_step for folder in folders[-1:] for stage in read(folder).stages), default=0)
    of_stage = [folder for folder in folders if (step_of(folder) or 0) > begun]
    losses = {folder: loss for folder in of_stage if (loss := _validation_loss(folder, read)) is not None}
    if losses:
        kept.add(min(losses, key=lambda folder: losses[folder]))  # the oldest of equals
    return kept


def require_disk_space(folder: Path, needed: int, settings: CheckpointConfig, what: str) -> None:
    """Raises CheckpointError when the disk of `folder` has fewer free bytes than `what` needs."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: {what} needs {needed:,} bytes, and its disk has {free:,} free bytes; free space or lower "
            f"checkpoint.keep_latest_k {settings.keep_latest_k}"
        )


def require_disk_space_for_run(
    run_folder: Path,
    settings: CheckpointConfig,
    checkpoint_bytes: int,
    first_step: int,
    last: int,
    *,
    keeps_best: bool,
) -> None:
    """Raises CheckpointError when the disk cannot hold the checkpoints that the run keeps at one time.

    Args:
        first_step: where the launch starts.
        last: the last step of the launch.
        keeps_best: the run has validations, so the checkpoint with the lowest loss is kept.
    """
    folders = [folder for folder in step_folders(run_folder) if (step_of(folder) or 0) <= first_step]

    def saves(every: int) -> int:
        return len(range((first_step // every + 1) * every, last, every))

    planned, retained = saves(settings.interval) + (first_step < last), 0
    if retain := settings.retain_interval:
        retained = saves(math.lcm(settings.interval, retain)) + (first_step < last and last % retain == 0)
    # One more than those kept: the checkpoint being written, because none is deleted before it is complete.
    at_once = settings.keep_latest_k + 1 + keeps_best
    new = min(planned, max(1, at_once - len(folders)) + retained)
    what = f"saving {new} more checkpoints" if new > 1 else "a checkpoint"
    require_disk_space(run_folder / CHECKPOINTS, new * checkpoint_bytes, settings, what)


def _validation_loss(folder: Path, read: Callable[[Path], Progress]) -> float | None:
    try:
        loss = read(folder).validation_loss
    except CheckpointError:
        return None  # damaged
    return loss if loss is not None and math.isfinite(loss) else None
