"""Which checkpoints of a run stay on disk, and whether there is room for the next."""

import math
import shutil
from pathlib import Path

from tost_lm.errors import CheckpointError
from tost_lm.model.checkpoint import step_folders
from tost_lm.training.config import CheckpointConfig, PretrainConfig
from tost_lm.training.progress import Progress


def prune(newest: Path, settings: CheckpointConfig) -> None:
    """Delete what interrupted saves left, and the checkpoints up to `newest` that `settings` does not keep.

    Those after it are damaged ones that the run was resumed before; they do not count.
    """
    folders = [folder for folder in step_folders(newest.parent.parent) if folder.name <= newest.name]
    kept = {*folders[-settings.keep :], *_kept_for_good(folders, settings)}
    losses = {folder: loss for folder in folders if (loss := _validation_loss(folder)) is not None}
    if losses:
        kept.add(min(losses, key=lambda folder: losses[folder]))  # the oldest of equals, nearest to the measurement
    for folder in folders:
        if folder not in kept:
            folder.rename(folder.with_name(f".{folder.name}.gone"))  # no reader finds half of it
    for leftover in newest.parent.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)  # on NFS, what is still open stays until the next time


def require_room(folder: Path, needed: int, settings: CheckpointConfig, what: str) -> None:
    """Raises CheckpointError when the disk of `folder` has fewer free bytes than `what` needs."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: {what} needs {needed:,} bytes, and {free:,} are free on its disk: free more or lower "
            f"checkpoint.keep, now {settings.keep}"
        )


def require_room_for_run(config: PretrainConfig, checkpoint_bytes: int) -> None:
    """Raises CheckpointError when the disk cannot hold the checkpoints that the run will have at one time."""
    settings, folders = config.checkpoint, step_folders(config.run_folder)
    step = _step(folders[-1]) if folders else 0
    coming = {*range(settings.every, config.last_step, settings.every), config.last_step} - set(range(step + 1))
    # Besides those kept there is the one being written, for none is deleted before it is whole.
    at_once = settings.keep + 1 + (config.validation.every is not None)
    for_good = [at for at in coming if settings.keep_every and at % settings.keep_every == 0]
    new = min(len(coming), max(1, at_once - len(folders)) + len(for_good))
    what = f"room for {new} more checkpoints" if new > 1 else "a checkpoint"
    require_room(config.run_folder / "checkpoints", new * checkpoint_bytes, settings, what)


def _kept_for_good(folders: list[Path], settings: CheckpointConfig) -> list[Path]:
    return [folder for folder in folders if settings.keep_every and _step(folder) % settings.keep_every == 0]


def _validation_loss(folder: Path) -> float | None:
    try:
        loss = Progress.read(folder).validation_loss
    except CheckpointError:
        return None  # damaged
    return loss if loss is not None and math.isfinite(loss) else None


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
