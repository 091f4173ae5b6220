"""One launch at a time in a run folder.

The lock is on `.NAME.lock` beside the folder, because the folder may be renamed. The kernel releases it whenever the
process ends.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tost_lm.errors import ConfigError
from tost_lm.files import open_lock


@contextmanager
def run_lock(run_folder: Path, rank: int) -> Iterator[None]:
    """Rank 0 makes the run folder, if there is none, and locks it against other launches.

    File systems with locks per node protect less; where there are none, a line warns of it.

    Raises:
        ConfigError: another launch has the lock (the message names its host and pid), the folder is read-only, or the
            lock file is a symbolic link.
    """
    if rank > 0:
        yield
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
            print(f"warning: {path}: {error.strerror}: nothing prevents a second launch in {run_folder}", flush=True)
        file.truncate(0)
        file.write(f"host {socket.gethostname()}, pid {os.getpid()}")
        file.flush()
        yield
