"""One launch at a time in a run folder, which stays the one that the launch started in.

The lock is on `.NAME.lock` beside the folder, because the folder may be renamed. The kernel releases it whenever the
process ends. Where the file system has no locks, `.NAME.owner` names the owner, which renews it all the time.
"""

import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tost_lm.errors import ConfigError, TrainingError
from tost_lm.files import open_lock, regular_file, write_atomically

BEAT_S = 2.0
"""Between two heartbeats of an owner file."""
STALE_S = 15.0
"""An owner file that does not change for so long has no owner. File systems on a network may be late."""


@contextmanager
def run_lock(run_folder: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Rank 0 makes the run folder, if there is none, and locks it against other launches.

    File systems with locks per node protect less.

    Yields:
        A check to call again and again: on rank 0 it raises TrainingError when the path no longer is the folder that
        was locked, when the lock file was removed, or when another launch has taken over the owner file.

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
            raise _in_use(run_folder, file.read()) from None
        except OSError as error:
            print(f"warning: {path}: {error.strerror}; using {path.stem}.owner, which is checked for {STALE_S:g} s")
            with _ownership(run_folder, path.with_suffix(".owner")) as owner:
                yield _check(run_folder, lambda: owner.require_own(run_folder))
            return
        file.truncate(0)
        file.write(f"host {socket.gethostname()}, pid {os.getpid()}")
        file.flush()
        held = _identity(file.fileno())
        yield _check(run_folder, lambda: _require_lock_file(run_folder, path, held))


def _in_use(run_folder: Path, owner: str) -> ConfigError:
    return ConfigError(
        f"{run_folder}: another launch is using it ({owner.strip()}); wait for it, stop it, or choose another run.name"
    )


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


class _OwnerFile:
    """A file that its owner rewrites every BEAT_S. Of launches that write it at the same time, the last one owns it."""

    def __init__(self, path: Path) -> None:
        self._path, self._beats = path, 0
        self.owner = f"host {socket.gethostname()}, pid {os.getpid()}"
        self._launch = secrets.token_hex(8)  # pids of containers may be equal

    def read(self) -> str:
        try:
            return regular_file(self._path).read_text()
        except FileNotFoundError:
            return ""

    def other(self) -> str:
        """The owner, if it is not this launch; empty: it is, or the file cannot be read now."""
        with suppress(OSError):
            text = self.read()
            return "" if self._launch in text else text.partition(", launch")[0] or "its owner file is gone"
        return ""

    def require_own(self, run_folder: Path) -> None:
        if other := self.other():
            raise TrainingError(
                f"{run_folder}: another launch has taken it over ({other}); this one saves nothing more"
            )

    def beat(self) -> None:
        self._beats += 1
        write_atomically(self._path, f"{self.owner}, launch {self._launch}, heartbeat {self._beats}")

    def beat_until(self, is_over: threading.Event) -> None:
        while not is_over.wait(BEAT_S) and not self.other():
            with suppress(OSError):  # whoever must write reports a full or lost disk
                self.beat()

    def living_owner(self) -> str:
        """The owner of a file that changes within STALE_S; empty: there is none."""
        first, until = self.read(), time.monotonic() + STALE_S
        while (text := self.read()) and time.monotonic() < until:
            if text != first:
                return text.partition(", launch")[0]
            time.sleep(BEAT_S / 4)
        return ""

    def remove(self) -> None:
        if not self.other():
            self._path.unlink(missing_ok=True)


@contextmanager
def _ownership(run_folder: Path, path: Path) -> Iterator[_OwnerFile]:
    """Raises ConfigError when another launch owns the file."""
    file, is_over = _OwnerFile(path), threading.Event()
    if owner := file.living_owner():
        raise _in_use(run_folder, owner)
    file.beat()
    time.sleep(BEAT_S)  # until a launch that has read the file before has written it, too
    if owner := file.other():
        raise _in_use(run_folder, owner)
    thread = threading.Thread(target=file.beat_until, args=(is_over,), daemon=True)
    thread.start()
    try:
        yield file
    finally:
        is_over.set()
        thread.join()
        file.remove()
