"""One launch per run folder."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tost_lm.errors import ConfigError


@contextmanager
def run_lock(run_folder: Path, rank: int) -> Iterator[None]:
    """Rank 0 locks the run folder against other launches; the kernel releases the lock whenever the process ends.

    The locked file is beside the folder, because the folder may be renamed. POSIX locks belong to the process, so
    forked loader workers do not hold it. File systems without locks, or with locks per node, protect less.

    Raises:
        ConfigError: another launch has the lock (the message names its host and pid), or the folder is read-only.
    """
    if rank > 0:
        yield
        return
    path = run_folder.with_name(f".{run_folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
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
                f"{run_folder}: another launch is using it ({file.read().strip()}); wait for it, stop it, or "
                "choose another run.name"
            ) from None
        except OSError:
            pass  # a file system without locks
        file.truncate(0)
        file.write(f"host {socket.gethostname()}, pid {os.getpid()}")
        file.flush()
        yield
