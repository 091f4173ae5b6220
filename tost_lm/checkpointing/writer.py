"""Writing the checkpoints of a run.

Each rank copies some of the tensors to host memory and writes them, in a thread, while training continues. Rank 0's
thread prepares the folder before the others write. After them it writes the manifest, renames the folder, applies the
retention and starts the upload.
"""

import errno
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from threading import Thread, main_thread
from typing import NamedTuple

import torch
from safetensors import SafetensorError

from tost_lm.checkpointing.format import (
    CARD,
    PROGRESS,
    RNG,
    RNG_NAME,
    SETTINGS,
    FileEntry,
    Progress,
    flush_and_hash,
    metadata_files,
    publish_checkpoint,
    shard_name,
    write_failure,
    write_tensors,
)
from tost_lm.checkpointing.run_folder import prune, require_disk_space, require_disk_space_for_run, step_folder
from tost_lm.checkpointing.settings import CheckpointConfig
from tost_lm.checkpointing.uploads import Uploads
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import CheckpointError
from tost_lm.files import make_temp_folder
from tost_lm.model.lm import parameter_shapes
from tost_lm.parallel.agreement import NoMessageError, ThreadMessages
from tost_lm.parallel.engine import Engine
from tost_lm.parallel.timeouts import Timeouts

RESUME = "run the same command to resume from the newest complete checkpoint"
SLOW_DISK = 200e6  # write rate [bytes/s] until a save has been measured


class RunFiles(NamedTuple):
    """The record of a run in its checkpoints, besides the state of the engine."""

    folder: Path
    """The run folder."""
    settings: str
    """Settings of the run, as TOML."""
    tokenizer: Tokenizer
    card: Callable[[Path], str]
    """The model card of a checkpoint folder that has all files but the manifest."""
    uploads: Uploads | None = None
    """Uploads each checkpoint; None: they stay local."""


class CheckpointWriter:
    """Writes a run's checkpoints and deletes those that the settings do not keep."""

    def __init__(self, engine: Engine, run: RunFiles, settings: CheckpointConfig, timeouts: Timeouts) -> None:
        """All ranks construct it together."""
        self._run, self._settings, self._timeouts = run, settings, timeouts
        self._messages = ThreadMessages("checkpoint")
        self._snapshot = Snapshot(engine, self._messages.rank, self._messages.size)
        self._bytes = self._snapshot.total_bytes + len(run.tokenizer.model_bytes) + 2**16
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._saves, self._newest_step = 0, -1
        self.save_seconds = 0.1 + self._bytes / SLOW_DISK
        """Duration [s] of the last save, from the copy to the rename; an estimate before the first save."""

    def require_disk_space(self, first_step: int, last_step: int, *, keeps_best: bool) -> None:
        """Raises CheckpointError on rank 0 if the disk is too small for the run: see `require_disk_space_for_run`."""
        if self._messages.rank == 0:
            require_disk_space_for_run(
                self._run.folder, self._settings, self._bytes, first_step, last_step, keeps_best=keeps_best
            )

    def save(self, progress: Progress) -> None:
        """Wait for the previous save and save the state after a step, all ranks together. A step is saved only once.

        Returns when the state is copied to host memory.

        Raises:
            CheckpointError: as `finish`.
        """
        self.finish()
        if progress.step == self._newest_step:
            return
        started = time.monotonic()
        self._snapshot.copy()
        self._saves, self._newest_step = self._saves + 1, progress.step
        # Not a daemon: Python waits for the file that is being written. The thread ends after it (`_write_files`).
        self._thread = Thread(target=self._work, args=(progress, started), name="checkpoint")
        self._thread.start()

    def poll(self) -> None:
        """Raises CheckpointError, once, if an asynchronous save failed; TrainingError as `Uploads.require_own`."""
        if self._run.uploads:
            self._run.uploads.require_own()
        if self._thread and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait until the save is published. Raises CheckpointError, once, if it failed."""
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error:
            self._newest_step = -1  # the save may be repeated
            raise error

    def finish_uploads(self, while_waiting: Callable[[], object]) -> None:
        """On rank 0, wait until the checkpoints are uploaded. Raises CheckpointError if the newest one is not."""
        if self._messages.rank == 0 and self._run.uploads:
            self._run.uploads.finish(while_waiting)

    @property
    def seconds_to_stop(self) -> float:
        """Duration [s] of a last save with its upload, as far as it is known."""
        return self.save_seconds + (self._run.uploads.seconds if self._run.uploads else 0.0)

    def _work(self, progress: Progress, started: float) -> None:
        folder = step_folder(self._run.folder, progress.step)
        temp_folder = folder.with_name(f".{folder.name}.tmp")
        try:
            if self._messages.rank == 0:
                self._save_on_rank_0(folder, temp_folder, progress)
            else:
                self._save_on_other_rank(temp_folder)
            self.save_seconds = time.monotonic() - started
        except NoMessageError as error:
            self._error = CheckpointError(f"{folder}: not saved: {error}; {RESUME}")
        except Exception as error:
            self._error = error

    def _save_on_rank_0(self, folder: Path, temp_folder: Path, progress: Progress) -> None:
        try:
            require_disk_space(folder, self._bytes, self._settings, "this checkpoint")
            with _explain_write_errors(temp_folder):
                make_temp_folder(folder)
            self._messages.write("go", self._saves, "")
            reports = [self._write_files(temp_folder, progress), *map(self._read_report, range(1, self._messages.size))]
            problems = [problem for _, problem in reports if problem]
            if problems:
                raise CheckpointError(problems[0])
            entries = {name: entry for entries, _ in reports for name, entry in entries.items()}
            card = self._run.card(temp_folder)
            with _explain_write_errors(temp_folder):
                (temp_folder / CARD).write_text(card)
                publish_checkpoint(temp_folder, folder, entries)
            with _explain_write_errors(folder.parent):
                prune(folder, self._settings)
            if self._run.uploads:
                self._run.uploads.start(folder, self._settings)
        except Exception as error:
            rmtree(temp_folder, ignore_errors=True)
            with suppress(NoMessageError):
                for key in ("go", "outcome"):
                    self._messages.write(key, self._saves, str(error) or type(error).__name__)
            raise
        self._messages.write("outcome", self._saves, "")

    def _save_on_other_rank(self, temp_folder: Path) -> None:
        self._wait_for_rank_0("go")
        entries, problem = self._write_files(temp_folder, None)
        self._messages.write(f"report/{self._messages.rank}", self._saves, json.dumps([entries, problem]))
        if problem:
            raise _reported_by_rank_0(problem)
        self._wait_for_rank_0("outcome")

    def _write_files(self, temp_folder: Path, progress: Progress | None) -> tuple[dict[str, FileEntry], str]:
        """Write this rank's files. Returns their entries in the manifest, or the problem."""
        entries = {}
        try:
            for name, write in self._files(progress).items():
                if not main_thread().is_alive():
                    raise CheckpointError(f"{temp_folder / name}: not written, because the run ended; {RESUME}")
                with _explain_write_errors(temp_folder / name):
                    write(temp_folder / name)
                    entries[name] = flush_and_hash(temp_folder / name)
        except CheckpointError as error:
            return {}, str(error)
        return entries, ""

    def _files(self, progress: Progress | None) -> dict[str, Callable[[Path], object]]:
        """This rank's files and their writers. With `progress` they include the files that a checkpoint has once."""
        copy, count = self._snapshot, len(self._snapshot.names_by_writer)
        files: dict[str, Callable[[Path], object]] = {}
        if copy.weights:
            files[shard_name("model", self._messages.rank, count)] = partial(write_tensors, tensors=copy.weights)
            files[shard_name("optimizer", self._messages.rank, count)] = partial(write_tensors, tensors=copy.statistics)
        if progress:
            writers = enumerate(copy.names_by_writer)
            shard_of = {name: shard_name("model", writer, count) for writer, names in writers for name in names}
            contents = metadata_files(copy.config, self._run.tokenizer, shard_of, copy.weight_bytes)
            contents[SETTINGS] = self._run.settings.encode()
            files |= {name: partial(Path.write_bytes, data=content) for name, content in contents.items()}
            files[RNG] = partial(write_tensors, tensors={RNG_NAME: copy.rng})
            files[PROGRESS] = lambda path: progress.write(path.parent)
        return files

    def _read_report(self, rank: int) -> tuple[dict[str, FileEntry], str]:
        try:
            report = self._messages.read(f"report/{rank}", self._saves, self._timeouts.heartbeat)
        except NoMessageError as error:
            return {}, f"rank {rank} did not write its shard of a checkpoint: {error}; {RESUME}"
        entries, problem = json.loads(report)
        return entries, problem and f"rank {rank}: {problem}"

    def _wait_for_rank_0(self, key: str) -> None:
        if problem := self._messages.read(key, self._saves, self._timeouts.save):
            raise _reported_by_rank_0(problem)


def _reported_by_rank_0(problem: str) -> CheckpointError:
    """An error that only rank 0 prints, because it reads the reports of all ranks."""
    error = CheckpointError(problem)
    error.printed_here = False
    return error


@contextmanager
def _explain_write_errors(path: Path) -> Iterator[None]:
    """Raises CheckpointError, with the file, the system's reason and a fix, when `path` cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number, reason = write_failure(error)
        full = number in (errno.ENOSPC, errno.EDQUOT)
        fix = "free space or lower checkpoint.keep_latest_k" if full else "remove the cause"
        raise CheckpointError(f"{path}: cannot be written: {reason}; {fix} and {RESUME}") from None


class Snapshot:
    """A copy in host memory of the whole float32 weights and optimizer state, by name, that this rank writes.

    Its memory, about the size of all state divided by the number of ranks, is allocated once and reused.
    """

    def __init__(self, engine: Engine, rank: int, ranks: int) -> None:
        self._engine, self.config = engine, engine.module.config
        shapes = parameter_shapes(self.config)
        self.weight_bytes = 4 * sum(shape.numel() for shape in shapes.values())
        """Bytes of the weights of all ranks."""
        statistics = engine.statistics()
        self.total_bytes = sum(4 * shape.numel() * (1 + len(statistics[name])) for name, shape in shapes.items())
        """Bytes of the weights and optimizer state of all ranks."""
        self.names_by_writer = assign_writers({name: shape.numel() for name, shape in shapes.items()}, ranks)
        """Parameter names for each writing rank, fewer than all ranks if there are fewer parameters."""
        names = self.names_by_writer[rank] if rank < len(self.names_by_writer) else []
        # The state is zero before the first update. Copies into pinned memory are several times as fast.
        pinned = engine.mesh.device.type == "cuda"
        self.weights = {name: torch.zeros(shapes[name], pin_memory=pinned) for name in names}
        self.statistics = {
            f"{statistic}/{name}": torch.zeros(shapes[name], pin_memory=pinned)
            for name in names
            for statistic in statistics[name]
        }
        self.rng = torch.get_rng_state()
        """State of torch's CPU generator. All ranks seed it alike, so one state restores any number of ranks."""

    def copy(self) -> None:
        """Copy the current state; all ranks call it."""
        self.rng = torch.get_rng_state()
        self._engine.copy_state(self.weights | self.statistics)


def assign_writers(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Distribute names over ranks so that the sums of their sizes are nearly equal; equal on all ranks, none empty."""
    names_by_writer: list[list[str]] = [[] for _ in range(min(ranks, len(sizes)))]
    loads = [0] * len(names_by_writer)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        names_by_writer[least].append(name)
        loads[least] += sizes[name]
    return names_by_writer
