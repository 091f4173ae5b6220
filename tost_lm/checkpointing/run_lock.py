"""One launch at a time in a run folder, which stays the one that the launch started in.

The lock is on `.NAME.lock` beside the folder, because the folder may be renamed. The kernel releases it whenever the
process ends. Where the file system has no locks, `.NAME.owner` is the record of the owner.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tost_lm.checkpointing.owner import ownership
from tost_lm.errors import ConfigError, TrainingError
from tost_lm.files import open_lock
from tost_lm.remote import RemotePath

SETTLE_S = 2.0
"""Until a launch that found no record has written its own."""


@contextmanager
def run_lock(run_folder: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Rank 0 makes the run folder, if there is none, and locks it against other launches.

    File systems with locks per node protect less.

    Yields:
        A check to call again and again: on rank 0 it raises TrainingError when the path no longer is the folder that
        was locked, when the lock file was removed, or when another launch has taken over the record.

    Raises:
        ConfigError: another launch has the lock (the message names its host and pid), the folder is read-only, or the
            lock file is a symbolic link.
    """
    if rank > 0:
        yield lambda: None
        return
    folder = run_folder.resolve()  # two names of one folder have one lock
    path = folder.with_name(f".{folder.name}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_lock(path)
    except OSError as error:
        raise ConfigError(
            f"{run_folder}: cannot be written: {error.strerror}; make it writable, or start in another folder"
        ) from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise ConfigError(
                f"{run_folder}: another launch is using it ({file.read().strip()}); wait for it, stop it, or choose "
                "another run.name"
            ) from None
        except OSError as error:
            record = path.with_suffix(".owner")
            print(f"warning: {path}: {error.strerror}; using {record.name}")
            with ownership(run_folder, RemotePath(f"file://{record}"), folder) as owner:
                time.sleep(SETTLE_S)
                owner.require_own()
                yield _check(run_folder, owner.require_own)
            return
        file.truncate(0)
        file.write(f"host {socket.gethostname()}, pid {os.getpid()}")
        file.flush()
        held = _identity(file.fileno())
        yield _check(run_folder, lambda: _require_lock_file(run_folder, path, held))


def _identity(path: Path | int) -> tuple[int, int] | None:
    """The inode and device of a path or an open file; None: there is none."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _require_lock_file(run_folder: Path, path: Path, held: tuple[int, int] | None) -> None:
    if _identity(path) != held:
        raise TrainingError(
            f"{run_folder}: its lock file {path} was removed during the run, so another launch may be using the "
            "folder; run the same command to resume"
        )


def _check(run_folder: Path, require_own: Callable[[], None]) -> Callable[[], None]:
    first = _identity(run_folder)

    def check() -> None:
        if _identity(run_folder) != first:
            raise TrainingError(
                f"{run_folder}: was moved or replaced during the run; move it back and run the same command to resume "
                "from its newest complete checkpoint"
            )
        require_own()

    return check
