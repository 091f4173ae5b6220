"""The record of the launch that owns a run: at the URL of its checkpoints, or beside a run folder without locks. The
launch renews it all the time. Of launches that write it at the same time, the last one owns the run.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from pydantic import BaseModel, ValidationError

from tost_lm.errors import ConfigError, StorageError, TrainingError
from tost_lm.remote import read_file, remove_file, write_file

BEAT_S = 15.0
"""Between two heartbeats."""
STALE_S = 60.0
"""A record that does not change for so long has no owner. Storages and networks may be late."""


class _Record(BaseModel):
    owner: str
    process: list[str]
    """`_process` of the owner."""
    launch: str
    heartbeat: int = 0

    @classmethod
    def read(cls, data: bytes | None) -> "_Record | None":
        """None: there is none, or it is being written."""
        with suppress(ValidationError):
            return cls.model_validate_json(data or b"")
        return None


class Owner:
    """This launch, which owns a run until another launch takes it over."""

    def __init__(self, run: Path, record: Path, run_folder: Path) -> None:
        """`run` is named in messages."""
        self._run, self._url, self._taken_by = run, record, ""
        who = f"host {socket.gethostname()}, pid {os.getpid()}, run folder {run_folder.absolute()}"
        self._record = _Record(owner=who, process=_process(os.getpid()), launch=secrets.token_hex(8))

    def claim(self) -> None:
        """Write the record.

        Raises:
            ConfigError: another launch owns the run.
            StorageError: the record cannot be read or written.
        """
        data = read_file(self._url)
        found = _Record.read(data)
        is_running = found and _is_running(found.process)
        if data is not None and is_running is None:
            who = f" ({found.owner})" if found else ""
            print(f"{self._run}: waiting {STALE_S:g} s to see whether its last launch still runs{who}", flush=True)
            found = self._renewed(data)
        elif not is_running:
            found = None
        if found:
            raise ConfigError(
                f"{self._run}: another launch is using it ({found.owner}); wait for it, stop it, or choose another "
                "run.name"
            )
        self._beat()

    def require_own(self, *, read: bool = True) -> None:
        """Raises TrainingError if another launch has taken over the run, as far as this one knows without `read`."""
        if read:
            with suppress(StorageError):  # whoever must write reports it
                self._look()
        if self._taken_by:
            raise TrainingError(
                f"{self._run}: another launch has taken it over ({self._taken_by}); this one saves nothing more"
            )

    def beat_until(self, is_over: Event) -> None:
        """Renew the record."""
        while not is_over.wait(BEAT_S) and not self._taken_by:
            with suppress(StorageError):
                self._look()
                if not self._taken_by:
                    self._beat()

    def leave(self) -> None:
        """Remove the record, if it can be, and is that of this launch."""
        with suppress(StorageError):
            self._look()
            if not self._taken_by:
                remove_file(self._url)

    def _beat(self) -> None:
        self._record.heartbeat += 1
        write_file(self._url, self._record.model_dump_json(indent=1).encode())

    def _look(self) -> None:
        data = read_file(self._url)
        found = _Record.read(data)
        if data is None or (found and found.launch != self._record.launch):
            self._taken_by = found.owner if found else "its record is gone"

    def _renewed(self, data: bytes) -> _Record | None:
        """The record, if its launch renews it."""
        until = time.monotonic() + STALE_S
        while time.monotonic() < until and (now := read_file(self._url)) is not None:
            if now != data and (found := _Record.read(now)):
                return found
            time.sleep(BEAT_S / 4)
        return None


@contextmanager
def ownership(run: Path, record: Path, run_folder: Path) -> Iterator[Owner]:
    """Own a run. Raises as `Owner.claim`."""
    owner, is_over = Owner(run, record, run_folder), Event()
    owner.claim()
    thread = Thread(target=owner.beat_until, args=(is_over,), daemon=True)
    thread.start()
    try:
        yield owner
    finally:
        is_over.set()
        thread.join()
        owner.leave()


def _process(pid: int | str) -> list[str]:
    """Boot, container, pid and start of a process of this computer; empty: it has ended, or nobody knows."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return [] if state in "ZX" else [boot, os.readlink("/proc/self/ns/pid"), str(pid), facts[18]]
    return []


def _is_running(process: list[str]) -> bool | None:
    """Whether another process runs; None: it is of another computer or container, so nobody knows."""
    this = _process(os.getpid())
    if not this or process[:2] != this[:2]:
        return None
    return process != this and _process(process[2]) == process
