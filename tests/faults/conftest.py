"""A tiny corpus and run."""

import contextlib
import io
import os
import random
import threading
import time
from pathlib import Path

import pytest
from launches import train
from made_once import made_once

from tost_lm.config import validate
from tost_lm.data.settings import DataPrepConfig
from tost_lm.data_prep.commands.shards import main as build_shards
from tost_lm.data_prep.commands.tokenizer import main as train_tokenizer

os.environ["WANDB_MODE"] = "disabled"

TINY_RUN = """
[model]
layers = 1
heads = 2
width = 16
vocab_size = 384
max_positions = 32
layer_scale = 1.0
[data]
folder = "shards"
workers = 0
[optim]
lr = 1e-2
warmup_steps = 2
[train]
steps = 300
global_batch_size = 4
micro_batch_size = 2
seq_len = 32
[checkpoint]
interval = 10
[run]
name = "tiny"
log_interval = 1
device = "cpu"
"""


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of drawn words."""
    return made_once(tmp_path_factory, "corpus", build_drawn) / "shards"


def build_drawn(folder: Path) -> None:
    """Write folder/shards."""
    draws = random.Random(0)
    words = ["".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(300)]
    texts = [" ".join(draws.choices(words, k=200)) for _ in range(60)]
    for number, text in enumerate(texts):
        (folder / f"{number:02d}.txt").write_text(text)
    tree = {
        "corpus": {"source": str(folder / "*.txt"), "valid_fraction": 0.1},
        "tokenizer": {"path": str(folder / "tokenizer.model"), "vocab_size": 384},
        "shards": {"folder": str(folder / "shards"), "workers": 1, "shard_tokens": 500},
    }
    config = validate(DataPrepConfig, tree, "test")
    with contextlib.redirect_stdout(io.StringIO()):
        train_tokenizer(None, config)
        build_shards(None, config)


class Pace:
    """How much longer work takes than the processor works on it: 1 on a quiet machine, more while others use its cores.

    A thread works for WORK_S in every WINDOW_S, as a rank does that watches the others.
    """

    WINDOW_S, WORK_S = 0.25, 0.01

    def __init__(self) -> None:
        self.slowest, self._is_over = 1.0, threading.Event()
        self._thread = threading.Thread(target=self._measure)

    def _measure(self) -> None:
        while not self._is_over.wait(self.WINDOW_S - self.WORK_S):
            worked, began = time.thread_time(), time.monotonic()
            while time.thread_time() < worked + self.WORK_S:
                pass
            self.slowest = max(self.slowest, (time.monotonic() - began) / (time.thread_time() - worked))

    def __enter__(self) -> "Pace":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.fixture
def pace() -> type[Pace]:
    """Measures the machine while a fault is injected; a limit of time is what is promised times `slowest`."""
    return Pace


@pytest.fixture
def workplace(shards: Path, tmp_path: Path) -> Path:
    """A folder with run.toml to launch training in."""
    (tmp_path / "shards").symlink_to(shards)
    (tmp_path / "run.toml").write_text(TINY_RUN)
    return tmp_path


@pytest.fixture(scope="session")
def uninterrupted(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the tiny run on 2 ranks without a stop."""

    def make(folder: Path) -> None:
        (folder / "shards").symlink_to(shards)
        (folder / "run.toml").write_text(TINY_RUN)
        train(folder, 2)

    return made_once(tmp_path_factory, "uninterrupted", make) / "runs/tiny"
