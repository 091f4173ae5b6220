"""Training checkpoints: a model folder that also has the optimizer state, by parameter name.

Every tensor is whole and float32, so a checkpoint resumes on any parallel layout and ZeRO stage. Each rank writes some
of the tensors, in a thread. Rank 0's thread prepares the folder before the others write. After them it writes the
manifest, renames the folder and applies the retention.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from threading import Thread, main_thread
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from tost_lm.config import to_toml
from tost_lm.data.mixture import Corpora
from tost_lm.errors import CheckpointError
from tost_lm.files import make_temp_folder
from tost_lm.model.checkpoint import (
    CARD,
    FileEntry,
    flush_and_hash,
    metadata_files,
    publish_checkpoint,
    shard_entries,
    shard_name,
    step_folder,
    write_tensors,
)
from tost_lm.parallel import zero
from tost_lm.parallel.messages import NoMessageError, ThreadMessages
from tost_lm.parallel.weights import draw_on_rank, read_on_rank
from tost_lm.training.card import model_card
from tost_lm.training.config import PretrainConfig
from tost_lm.training.progress import Progress
from tost_lm.training.retention import prune, require_disk_space, require_disk_space_for_run
from tost_lm.training.snapshot import Snapshot
from tost_lm.training.write_errors import RESUME, explain_write_errors

RNG_FILE = "rng.safetensors"
RNG_NAME = "torch.cpu"
SLOW_DISK = 200e6  # write rate [bytes/s] until a save has been measured


class CheckpointWriter:
    """Writes a run's checkpoints and deletes those that the settings do not keep."""

    def __init__(self, engine: Any, config: PretrainConfig, corpora: Corpora, first_step: int = 0) -> None:
        """All ranks construct it together. A run without a checkpoint starts after `first_step` steps.

        Raises:
            CheckpointError: the disk is too small for the run; on rank 0.
        """
        self._config, self._tokenizer = config, corpora.tokenizer()
        self._messages = ThreadMessages("checkpoint")
        self._snapshot = Snapshot(engine, config.model, self._messages.rank, self._messages.size)
        self._bytes = self._snapshot.total_bytes + len(self._tokenizer.model_bytes) + 2**16
        if self._messages.rank == 0:
            require_disk_space_for_run(config, self._bytes, first_step)
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._saves, self._newest_step = 0, -1
        self.save_seconds = 0.1 + self._bytes / SLOW_DISK
        """Duration [s] of the last save, from the copy to the rename; an estimate before the first save."""

    def save(self, progress: Progress) -> None:
        """Wait for the previous save and save the state after a step, all ranks together. A step is saved only once.

        Returns when the state is copied to host memory, or with `checkpoint.asynchronous = false` when it is published.

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
        if not self._config.checkpoint.asynchronous:
            self.finish()

    def poll(self) -> None:
        """Raises CheckpointError, once, if an asynchronous save failed."""
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

    def _work(self, progress: Progress, started: float) -> None:
        folder = step_folder(self._config.run_folder, progress.step)
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
            require_disk_space(folder, self._bytes, self._config.checkpoint, "this checkpoint")
            with explain_write_errors(temp_folder):
                make_temp_folder(folder)
            self._messages.write("go", self._saves, "")
            reports = [self._write_files(temp_folder, progress), *map(self._read_report, range(1, self._messages.size))]
            problems = [problem for _, problem in reports if problem]
            if problems:
                raise CheckpointError(problems[0])
            entries = {name: entry for entries, _ in reports for name, entry in entries.items()}
            card = model_card(temp_folder, run=self._config.run_folder)
            with explain_write_errors(temp_folder):
                (temp_folder / CARD).write_text(card)
                publish_checkpoint(temp_folder, folder, entries)
            with explain_write_errors(folder.parent):
                prune(folder, self._config.checkpoint)
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
                with explain_write_errors(temp_folder / name):
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
            contents = metadata_files(self._config.model, self._tokenizer, shard_of, copy.weight_bytes)
            contents["config.toml"] = to_toml(self._config).encode()
            files |= {name: partial(Path.write_bytes, data=content) for name, content in contents.items()}
            files[RNG_FILE] = partial(write_tensors, tensors={RNG_NAME: copy.rng})
            files["training.json"] = lambda path: progress.write(path.parent)
        return files

    def _read_report(self, rank: int) -> tuple[dict[str, FileEntry], str]:
        try:
            report = self._messages.read(f"report/{rank}", self._saves, self._config.run.timeouts.heartbeat)
        except NoMessageError as error:
            return {}, f"rank {rank} did not write its shard of a checkpoint: {error}; {RESUME}"
        entries, problem = json.loads(report)
        return entries, problem and f"rank {rank}: {problem}"

    def _wait_for_rank_0(self, key: str) -> None:
        if problem := self._messages.read(key, self._saves, self._config.run.timeouts.save):
            raise _reported_by_rank_0(problem)


def _reported_by_rank_0(problem: str) -> CheckpointError:
    """An error that only rank 0 prints, because it reads the reports of all ranks."""
    error = CheckpointError(problem)
    error.printed_here = False
    return error


def restore(engine: Any, folder: Path) -> Progress:
    """Load a checkpoint's state, tensor by tensor, into a new engine; a collective call. Returns its progress.

    Raises:
        DamagedCheckpointError: on all ranks; the engine must not be used.
    """
    progress = Progress.read(folder)
    zero.create_state(engine, progress.updates)
    zero.set_state(engine, _read(engine, folder, "model", "optimizer"))
    if (folder / RNG_FILE).is_file():  # not in a converted checkpoint
        torch.set_rng_state(load_file(folder / RNG_FILE)[RNG_NAME])
    return progress


def load_weights(engine: Any, folder: Path) -> None:
    """Load the weights of a model folder into a new engine; a collective call. Raises as `restore`."""
    zero.set_state(engine, _read(engine, folder, "model"))


def draw_weights(engine: Any) -> None:
    """Draw the weights of a new engine, as `TostLM` does."""
    zero.set_state(engine, draw_on_rank(engine.module, engine.module.config, engine.mesh.tensor))


def _read(engine: Any, folder: Path, *kinds: Literal["model", "optimizer"]) -> Iterator[tuple[str, Tensor]]:
    files = {folder / name: entry for kind in kinds for name, entry in shard_entries(folder, kind).items()}
    return read_on_rank(engine.module, engine.module.config, files, engine.mesh, zero.statistics(engine))
