"""One launch per run folder."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tost_lm.errors import ConfigError


@contextmanager
def only_launch(run_folder: Path, rank: int) -> Iterator[None]:
    """Rank 0 holds a run folder against other launches; the kernel lets go of it however this process ends.

    The lock is a file beside the folder, which may be renamed. It belongs to the process (POSIX), so that workers
    forked from it do not keep it. File systems without locks, and those that lock only within a node, protect less.

    Raises:
        ConfigError: another launch holds it; names its host and pid.
    """
    if rank > 0:
        yield
        return
    path = run_folder.with_name(f".{run_folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise ConfigError(
                f"{run_folder}: another launch is at work on it ({file.read().strip()}); wait for it, stop it, or "
                "choose another run.name"
            ) from None
        except OSError:
            pass  # a file system without locks
        file.truncate(0)
        file.write(f"host {socket.gethostname()}, pid {os.getpid()}")
        file.flush()
        yield
