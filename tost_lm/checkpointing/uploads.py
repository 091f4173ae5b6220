"""The checkpoints of a run at a URL: uploaded in the background, kept by the same retention, and fetched to resume.

They are in URL/checkpoints/step_…, as in a run folder. A checkpoint that has its manifest is complete, because this is
written last and removed first. Of several launches, the last one that wrote URL/owner.txt uploads there.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread, main_thread

from tost_lm.checkpointing.format import MANIFEST, PROGRESS, SETTINGS, Progress, read_entries, verify_checkpoint
from tost_lm.checkpointing.run_folder import CHECKPOINTS, kept_folders, step_folder, step_folders, step_of
from tost_lm.checkpointing.settings import CheckpointConfig
from tost_lm.errors import CheckpointError, StorageError, TrainingError
from tost_lm.files import write_atomically
from tost_lm.remote import (
    fetch_folder,
    list_files,
    local_copy,
    read_file,
    remove_folder,
    upload_folder,
    write_file,
)

WAIT_S = 1.0
OWNER = "owner.txt"


class Uploads:
    """Uploads the checkpoints of a run, in a thread. What fails is repeated after the next save."""

    def __init__(self, url: Path, run_folder: Path) -> None:
        """Take over the URL. Raises StorageError."""
        where = f"host {socket.gethostname()}, pid {os.getpid()}, run folder {run_folder.absolute()}"
        self._url, self._launch, self._taken_by = url, f"{where}, launch {secrets.token_hex(4)}", ""
        write_file(url / OWNER, self._launch.encode())
        self._uploaded: set[str] = set()
        self._newest: Path | None = None
        self._thread: Thread | None = None
        self._problem = ""
        self.seconds = 0.0
        """Duration [s] of the last upload."""

    def require_own(self) -> None:
        """Raises TrainingError if the last upload found that a later launch has taken over the URL."""
        if self._taken_by:
            raise TrainingError(
                f"{self._url}: a later launch uploads there ({self._taken_by}), so this one ends; to go on here, stop "
                "that one and run the same command"
            )

    def start(self, newest: Path, settings: CheckpointConfig) -> None:
        """Upload the checkpoints of the run up to `newest`, after an upload that has begun, and remove there those that
        `settings` does not keep."""
        self._newest = newest
        self._thread = Thread(target=self._work, args=(newest, settings, self._thread), name="upload")
        self._thread.start()

    def finish(self, while_waiting: Callable[[], object] = lambda: None) -> None:
        """Wait for the uploads. Raises CheckpointError if the newest checkpoint is not uploaded."""
        while self._thread and self._thread.is_alive():
            while_waiting()
            self._thread.join(WAIT_S)
        if self._problem:
            raise CheckpointError(f"{self._newest}: saved, but not uploaded: {self._problem}")

    def _work(self, newest: Path, settings: CheckpointConfig, earlier: Thread | None) -> None:
        if earlier:
            earlier.join()
        if newest != self._newest or not main_thread().is_alive():  # a later call does it, or the next launch
            return
        started = time.monotonic()
        try:
            self._upload(newest, settings)
            self._problem = ""
        except Exception as error:
            self._problem = str(error) or type(error).__name__
            print(f"warning: {newest}: saved, but not uploaded yet: {self._problem}", flush=True)
        self.seconds = time.monotonic() - started

    def _upload(self, newest: Path, settings: CheckpointConfig) -> None:
        self._require_last()
        for folder in reversed([one for one in step_folders(newest.parent.parent) if one.name <= newest.name]):
            target = self._url / CHECKPOINTS / folder.name
            try:
                if folder.name not in self._uploaded and not _is_uploaded(folder, target):
                    upload_folder(folder, target, MANIFEST)
                self._uploaded.add(folder.name)
            except CheckpointError:  # damaged, or not kept any more
                continue
            except (StorageError, FileNotFoundError):
                if folder.exists():
                    raise
        self._require_last()
        self._prune(newest, settings)
        target = self._url / CHECKPOINTS / newest.name
        if newest.exists() and not _is_uploaded(newest, target):
            raise StorageError(f"{target}: incomplete after its upload; run the same command again")

    def _require_last(self) -> None:
        """Read the record. Raises TrainingError as `require_own`, or StorageError."""
        found = read_file(self._url / OWNER)
        if found != self._launch.encode():
            self._taken_by = (found or b"its record is gone").decode(errors="replace")
        self.require_own()

    def _prune(self, newest: Path, settings: CheckpointConfig) -> None:
        """Remove the remains of interrupted uploads, and the checkpoints that `settings` does not keep."""

        def read(folder: Path) -> Progress:
            local = newest.with_name(folder.name)
            return Progress.read(local if local.exists() else local_copy(folder / PROGRESS).parent)

        complete = [folder for folder in step_folders(self._url) if folder.name <= newest.name]
        kept = {folder.name for folder in kept_folders(complete, settings, read)}
        found = {name.partition("/")[0] for name in list_files(self._url / CHECKPOINTS, deep=True)}
        for name in found:
            if name not in kept and name <= newest.name:
                remove_folder(self._url / CHECKPOINTS / name, MANIFEST)


def _is_uploaded(folder: Path, target: Path) -> bool:
    """Whether a URL has all files of a checkpoint. Raises StorageError, and CheckpointError if it is damaged here."""
    sizes = {name: entry["bytes"] for name, entry in read_entries(folder).items()}
    found = {name: file.size for name, file in list_files(target).items() if name in sizes}
    return found == sizes and read_file(target / MANIFEST) == (folder / MANIFEST).read_bytes()


def fetch_newest(url: Path, run_folder: Path, warn: Callable[[str], None] = print) -> None:
    """Copy the newest checkpoint of a run at a URL into its folder, unless the folder has one that is not older. All
    ranks call it, and one of those that share the folder copies.

    Raises:
        StorageError: the storage cannot be reached, or refuses.
    """
    valid = [folder.name for folder in step_folders(run_folder) if _is_valid(folder)]
    for folder in reversed([folder for folder in step_folders(url) if folder.name > max(valid, default="")]):
        try:
            _fetch(folder, run_folder, warn)
            break
        except CheckpointError as error:
            warn(f"skipped checkpoint: {error}")


def _fetch(folder: Path, run_folder: Path, warn: Callable[[str], None]) -> None:
    target = step_folder(run_folder, step_of(folder) or 0)
    if not _is_valid(target):
        warn(f"fetching {folder}")
        fetch_folder(folder, target, verify_checkpoint, is_there=_is_valid)
    if not (run_folder / SETTINGS).exists():
        write_atomically(run_folder / SETTINGS, (target / SETTINGS).read_bytes())


def _is_valid(folder: Path) -> bool:
    try:
        verify_checkpoint(folder, hash_shards=False)
    except CheckpointError:
        return False
    return True
