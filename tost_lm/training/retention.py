"""Retention: which checkpoints of a run stay on disk, and whether the disk has space for more."""

import math
import shutil
from pathlib import Path

from tost_lm.errors import CheckpointError
from tost_lm.model.checkpoint import step_folders
from tost_lm.training.config import CheckpointConfig, PretrainConfig
from tost_lm.training.progress import Progress


def prune(newest: Path, settings: CheckpointConfig) -> None:
    """Delete the remains of interrupted saves, and the checkpoints up to `newest` that `settings` does not keep.

    Checkpoints after `newest` are damaged, because the run resumed from an earlier one; they do not count.
    """
    folders = [folder for folder in step_folders(newest.parent.parent) if folder.name <= newest.name]
    kept = {*folders[-settings.keep_latest_k :], *_retained(folders, settings)}
    losses = {folder: loss for folder in folders if (loss := _validation_loss(folder)) is not None}
    if losses:
        kept.add(min(losses, key=lambda folder: losses[folder]))  # the oldest of equals
    for folder in folders:
        if folder not in kept:
            folder.rename(folder.with_name(f".{folder.name}.gone"))  # no reader sees a half-deleted folder
    for leftover in newest.parent.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)  # on NFS an open file stays until the next call


def require_disk_space(folder: Path, needed: int, settings: CheckpointConfig, what: str) -> None:
    """Raises CheckpointError when the disk of `folder` has fewer free bytes than `what` needs."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: {what} needs {needed:,} bytes, and its disk has {free:,} free bytes; free space or lower "
            f"checkpoint.keep_latest_k {settings.keep_latest_k}"
        )


def require_disk_space_for_run(config: PretrainConfig, checkpoint_bytes: int, first_step: int = 0) -> None:
    """Raises CheckpointError when the disk cannot hold the checkpoints that the run keeps at one time.

    `first_step` is where a run without a checkpoint starts.
    """
    settings, folders = config.checkpoint, step_folders(config.run_folder)
    step, last = _step(folders[-1]) if folders else first_step, config.last_step

    def saves(every: int) -> int:
        return len(range((step // every + 1) * every, last, every))

    planned, retained = saves(settings.interval) + (step < last), 0
    if retain := settings.retain_interval:
        retained = saves(math.lcm(settings.interval, retain)) + (step < last and last % retain == 0)
    # One more than those kept: the checkpoint being written, because none is deleted before it is complete.
    at_once = settings.keep_latest_k + 1 + (config.validation.every is not None)
    new = min(planned, max(1, at_once - len(folders)) + retained)
    what = f"saving {new} more checkpoints" if new > 1 else "a checkpoint"
    require_disk_space(config.run_folder / "checkpoints", new * checkpoint_bytes, settings, what)


def _retained(folders: list[Path], settings: CheckpointConfig) -> list[Path]:
    return [folder for folder in folders if settings.retain_interval and _step(folder) % settings.retain_interval == 0]


def _validation_loss(folder: Path) -> float | None:
    try:
        loss = Progress.read(folder).validation_loss
    except CheckpointError:
        return None  # damaged
    return loss if loss is not None and math.isfinite(loss) else None


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
