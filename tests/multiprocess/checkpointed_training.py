"""A tiny run that saves and resumes, on any parallel layout, in a folder of a test's own."""

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hand_made import hand_made
from stage_records import recorded
from training_on_layouts import BATCH, VOCAB, T, build_engine, build_model, train_steps

import tost_lm
from tost_lm.checkpointing.format import Progress
from tost_lm.checkpointing.reading import restore
from tost_lm.checkpointing.run_folder import find_checkpoint, step_folder, step_folders
from tost_lm.config import validate
from tost_lm.data.loader import Corpora
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.errors import CheckpointError
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.engine import build_writer
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.stage_run import StageRun
from tost_lm.testing import run_on_ranks

RUN = Path("runs/r")
Curve = list[tuple[float, float, float]]
"""For each step: loss, gradient norm and a number that torch's generator of the rank gave."""


class Trainee(NamedTuple):
    """The training, and where it is saved."""

    folder: Path
    """Holds runs/; every rank works in it."""
    corpora: Corpora
    parallel: ParallelConfig = ParallelConfig()
    bfloat16: bool = False
    timeout_s: float = 20
    optimizer: str = "adamw"
    model: dict[str, Any] = {}  # noqa: RUF012, never changed
    """Settings that differ from those of `build_model`."""

    def config(self, **checkpoint: Any) -> PretrainConfig:
        tree = {
            "model": build_model(**self.model).config.model_dump(mode="json"),
            "data": {"folder": "shards"},
            "optim": {"kind": self.optimizer},
            "train": {"steps": 99, "global_batch_size": BATCH, "micro_batch_size": 1, "seq_len": T},
            "parallel": self.parallel.model_dump(),
            "checkpoint": checkpoint,
            "run": {"name": RUN.name, "timeout_seconds": self.timeout_s},
        }
        return validate(PretrainConfig, tree, "test")

    def begin(self, **checkpoint: Any) -> "Training":
        return Training(self, self.config(**checkpoint))


class Training:
    """On a rank: from the newest checkpoint, or from the start."""

    def __init__(self, trainee: Trainee, config: PretrainConfig) -> None:
        self.folder = trainee.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        os.chdir(self.folder)
        at = find_checkpoint(RUN) if step_folders(RUN) else None
        self.engine = build_engine(trainee.parallel, trainee.optimizer, bfloat16=trainee.bfloat16, **trainee.model)
        self.progress = restore(self.engine, at) if at else Progress(0, 0, stages=(recorded(config),))
        self.optimizer = trainee.optimizer
        self.writer = build_writer(self.engine, StageRun(config, config.in_stages()[0], trainee.corpora, ()))
        self.curve: Curve = []

    def step(self) -> None:
        at = self.progress.step
        ((loss, norm),) = train_steps(self.engine, self.optimizer, range(at, at + 1))
        self.curve.append((loss, norm, float(torch.rand(1))))
        self.progress = replace(self.progress, step=at + 1, updates=at + 1, recent=((loss, norm),))

    def train(self, until: int, save_after: tuple[int, ...]) -> Curve:
        """Steps up to `until`, each checkpoint written while the next steps are taken."""
        while self.progress.step < until:
            self.step()
            self.writer.poll()
            if self.progress.step in save_after:
                self.writer.save(self.progress)
        self.writer.finish()
        return self.curve


def make_corpora(folder: Path) -> Corpora:
    shards = hand_made(folder / "shards", [30, 40], vocab_size=VOCAB)
    (folder / "shards/tokenizer.model").write_bytes(train_sentencepiece(["a few words of a text"] * 40, 270))
    return Corpora([shards], [1.0])


def checkpoint_files(folder: Path, step: int) -> dict[str, bytes]:
    """The bytes of a run's checkpoint."""
    return {path.name: path.read_bytes() for path in step_folder(folder / RUN, step).iterdir()}


def save_until_killed(trainee: Trainee, seed: int) -> None:
    """For `run_on_ranks`: go on from the newest checkpoint, and kill this rank or the other at some point of a save.

    Rank 0 notes in losses.jsonl what it finds: [step, loss, the newest step that is surely saved].
    """
    generator, training, saved = random.Random(seed), trainee.begin(keep_latest_k=1), -1
    victim, saves_before = generator.randrange(2), generator.randrange(1, 4)
    for number in range(99):
        training.step()
        training.writer.finish()
        if dist.get_rank() == 0:
            with Path("losses.jsonl").open("a") as file:
                file.write(json.dumps([training.progress.step, training.curve[-1][0], saved]) + "\n")
        if number == saves_before and dist.get_rank() == victim:
            moment = generator.uniform(0, 1.1) * training.writer.save_seconds
            threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
        training.writer.save(training.progress)
        saved = training.progress.step


def assert_kills_lose_nothing(folder: Path, corpora: Corpora, kills: int) -> int:
    """After each kill the newest checkpoint is whole, and the run goes on from it to the bit.

    Returns:
        How many of the kills left a part of a checkpoint.
    """
    trainee, saved, torn, losses = Trainee(folder, corpora), -1, 0, {}
    for seed in range(kills):
        with pytest.raises(RuntimeError, match="died with exit code -9"):
            run_on_ranks(save_until_killed, 2, trainee, seed)
        rows = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
        torn += any((folder / RUN / "checkpoints").glob(".step_*"))
        said: list[str] = []
        newest = find_checkpoint(folder / RUN, said.append)
        tost_lm.load(newest)
        assert said == []
        saved = max(saved, *(row[2] for row in rows))
        assert Progress.read(newest).step >= saved
        for step, loss, _ in rows:
            assert losses.setdefault(step, loss) == loss
    assert len(losses) > kills
    return torn


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory, mounted with such options. Skips where the machine does not allow it."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def problem_of(action: Callable[[], object]) -> str:
    """The one line of a CheckpointError that an action ends with."""
    return str(error_of(action))


def error_of(action: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as raised:
        action()
    assert "\n" not in str(raised.value)
    return raised.value


def in_turn(trainee: Trainee, until: int, *save_after: int) -> Curve:
    """For `run_on_ranks`: train and save."""
    return trainee.begin(keep_latest_k=9).train(until, save_after)
