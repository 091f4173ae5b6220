"""Training checkpoints: a model folder with the optimizer's state beside the weights, by parameter name.

Every tensor is whole and float32, so a checkpoint resumes on any mix of tensor, sequence and data ranks and ZeRO stage.
Each rank writes its share of them, in a thread. Rank 0's goes before the others (is there room? an empty folder) and
after them (manifest, rename, deleting old ones).
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from threading import Thread, main_thread
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tost_lm.config import to_toml
from tost_lm.data.mixture import Corpora
from tost_lm.errors import CheckpointError
from tost_lm.files import folder_aside
from tost_lm.model.checkpoint import (
    FileEntry,
    StoredTensors,
    describe,
    publish_checkpoint,
    sealed,
    shard_name,
    write_tensors,
)
from tost_lm.parallel import zero
from tost_lm.parallel.board import Board, NoWordError
from tost_lm.training.config import PretrainConfig
from tost_lm.training.progress import Progress
from tost_lm.training.retention import prune, require_room, require_room_for_run
from tost_lm.training.run_folder import step_folder
from tost_lm.training.snapshot import Snapshot
from tost_lm.training.write_errors import AGAIN, naming_file

RNG_FILE = "rng.safetensors"
RNG_NAME = "torch.cpu"
SLOW_DISK = 200e6  # bytes a second, until a save has been measured


class CheckpointWriter:
    """Writes a run's checkpoints, of which it keeps those that the settings say."""

    def __init__(self, engine: Any, config: PretrainConfig, corpora: Corpora) -> None:
        """All ranks make it together. Raises CheckpointError on rank 0 when the disk is too small for the run."""
        self._config, self._tokenizer = config, corpora.tokenizer()
        self._board = Board("checkpoint")
        self._snapshot = Snapshot(engine, config.model, self._board.rank, self._board.size)
        self._bytes = self._snapshot.total_bytes + len(self._tokenizer.model_bytes) + 2**16
        if self._board.rank == 0:
            require_room_for_run(config, self._bytes)
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._saves, self._newest_step = 0, -1
        self.save_seconds = 0.1 + self._bytes / SLOW_DISK
        """What the last save took in all, from the copy to the renamed folder; before the first an estimate."""

    def save(self, progress: Progress) -> None:
        """Save the state after a step, all ranks together, after the save before is complete. A step that this writer
        saved already is not saved again.

        Returns once the copy in host memory is made, or with `checkpoint.asynchronous = false` all is published.

        Raises:
            CheckpointError: as `finish`.
        """
        self.finish()
        if progress.step == self._newest_step:
            return
        started = time.monotonic()
        self._snapshot.take()
        self._saves, self._newest_step = self._saves + 1, progress.step
        # Not a daemon: Python cannot end while one is in the midst of a file. When the main thread ends, so does this.
        self._thread = Thread(target=self._work, args=(progress, started), name="checkpoint")
        self._thread.start()
        if not self._config.checkpoint.asynchronous:
            self.finish()

    def poll(self) -> None:
        """Raises CheckpointError, once, if a save failed in the background."""
        if self._thread and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait until everything is published. Raises CheckpointError, once, if it could not be."""
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error:
            self._newest_step = -1  # it may be tried again
            raise error

    def _work(self, progress: Progress, started: float) -> None:
        folder = step_folder(self._config.run_folder, progress.step)
        aside = folder.with_name(f".{folder.name}.tmp")
        try:
            if self._board.rank == 0:
                self._lead(folder, aside, progress)
            else:
                self._follow(folder, aside)
            self.save_seconds = time.monotonic() - started
        except NoWordError as error:
            self._error = CheckpointError(f"{folder}: was not saved: {error}; {AGAIN}")
        except Exception as error:
            self._error = error

    def _lead(self, folder: Path, aside: Path, progress: Progress) -> None:
        """Rank 0's work."""
        try:
            require_room(folder, self._bytes, self._config.checkpoint, "this checkpoint")
            with naming_file(aside):
                folder_aside(folder)
            self._board.write("go", self._saves, "")
            reports = [self._report(aside, progress), *map(self._report_of, range(1, self._board.size))]
            problems = [problem for _, problem in reports if problem]
            if problems:
                raise CheckpointError(problems[0])
            entries = {name: entry for entries, _ in reports for name, entry in entries.items()}
            with naming_file(aside):
                publish_checkpoint(aside, folder, entries)
            with naming_file(folder.parent):
                prune(folder, self._config.checkpoint)
        except Exception as error:
            rmtree(aside, ignore_errors=True)
            with suppress(NoWordError):
                for key in ("go", "outcome"):
                    self._board.write(key, self._saves, str(error) or type(error).__name__)
            raise
        self._board.write("outcome", self._saves, "")

    def _follow(self, folder: Path, aside: Path) -> None:
        """The work of another rank."""
        self._wait_for_0("go")
        entries, problem = self._report(aside, None)
        self._board.write(f"report/{self._board.rank}", self._saves, json.dumps([entries, problem]))
        if problem:
            raise _told_by_0(problem)
        self._wait_for_0("outcome")

    def _report(self, aside: Path, progress: Progress | None) -> tuple[dict[str, FileEntry], str]:
        """Write this rank's files: what the manifest is to say of them, or what the problem is."""
        entries = {}
        try:
            for name, write in self._files(progress).items():
                if not main_thread().is_alive():
                    raise CheckpointError(f"{aside / name}: the run ended before it was written; {AGAIN}")
                with naming_file(aside / name):
                    write(aside / name)
                    entries[name] = sealed(aside / name)
        except CheckpointError as error:
            return {}, str(error)
        return entries, ""

    def _files(self, progress: Progress | None) -> dict[str, Callable[[Path], object]]:
        """This rank's files, each with what writes it; with `progress`, those that a checkpoint has one of, too."""
        copy, count = self._snapshot, len(self._snapshot.shares)
        files: dict[str, Callable[[Path], object]] = {}
        if copy.weights:
            files[shard_name("model", self._board.rank, count)] = partial(write_tensors, tensors=copy.weights)
            files[shard_name("optimizer", self._board.rank, count)] = partial(write_tensors, tensors=copy.statistics)
        if progress:
            shard_of = {name: shard_name("model", at, count) for at, names in enumerate(copy.shares) for name in names}
            contents = describe(self._config.model, self._tokenizer, shard_of, copy.weight_bytes)
            contents["config.toml"] = to_toml(self._config).encode()
            files |= {name: partial(Path.write_bytes, data=content) for name, content in contents.items()}
            files[RNG_FILE] = partial(write_tensors, tensors={RNG_NAME: copy.rng})
            files["training.json"] = lambda path: progress.write(path.parent)
        return files

    def _report_of(self, rank: int) -> tuple[dict[str, FileEntry], str]:
        try:
            said = self._board.read(f"report/{rank}", self._saves, self._config.run.timeout_seconds)
        except NoWordError as error:
            return {}, f"rank {rank} did not write its part of a checkpoint: {error}; {AGAIN}"
        entries, problem = json.loads(said)
        return entries, problem and f"rank {rank}: {problem}"

    def _wait_for_0(self, key: str) -> None:
        # Twice, as rank 0 waits that long for the slowest rank.
        if problem := self._board.read(key, self._saves, 2 * self._config.run.timeout_seconds):
            raise _told_by_0(problem)


def _told_by_0(problem: str) -> CheckpointError:
    """Of every rank, for rank 0 reads their reports."""
    error = CheckpointError(problem)
    error.printed_here = False
    return error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Whole float32 weights by parameter name."""
    return dict(StoredTensors(folder, "model"))


def restore(engine: Any, folder: Path) -> Progress:
    """Put a checkpoint's state into a fresh engine that has its weights, tensor by tensor; how far it is."""
    progress = Progress.read(folder)
    statistics = StoredTensors(folder, "optimizer")
    labels = [label.split("/", 1) for label in statistics]
    moments = ((name, statistic, statistics[f"{statistic}/{name}"]) for statistic, name in labels)
    zero.restore(engine, StoredTensors(folder, "model"), moments, progress.updates)
    torch.set_rng_state(load_file(folder / RNG_FILE)[RNG_NAME])
    return progress
