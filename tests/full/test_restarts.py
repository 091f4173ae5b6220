"""Twenty deaths in one launch: torchrun starts the ranks again each time, and they carry the run through."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep import build_shards, train_tokenizer
from tost_lm.config import validate
from tost_lm.data.config import DataPrepConfig
from tost_lm.parallel.heartbeat import read_heartbeats

CHECKOUT = Path(__file__).parents[2]
KILLS = 20
RUN = """
[model]
layers = 1
heads = 2
width = 16
vocab_size = 384
max_positions = 16
[data]
folder = "shards"
workers = 0
[optim]
lr = 1e-2
warmup_steps = 2
[train]
steps = 600
batch_sequences = 4
micro_batch_sequences = 1
sequence_tokens = 16
[checkpoint]
every = 10
[run]
name = "tiny"
log_every = 1
device = "cpu"
timeout_seconds = 20
"""


def make_shards(folder: Path) -> None:
    draws = random.Random(0)
    words = ["".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(300)]
    texts = [" ".join(draws.choices(words, k=200)) for _ in range(60)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tree = {
        "corpus": {"source": str(folder / "corpus.jsonl"), "valid_share": 0.1},
        "tokenizer": {"path": str(folder / "tokenizer.model"), "vocab_size": 384},
        "shards": {"folder": str(folder / "shards"), "workers": 1},
    }
    config = validate(DataPrepConfig, tree, "test")
    train_tokenizer.main(None, config)
    build_shards.main(None, config)


def launch(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={KILLS}"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    with (folder / "stderr").open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *torchrun, "-m", "pretrain.train", "run.toml", *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )


def curve(run_folder: Path) -> list[tuple[float, ...]]:
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]


@pytest.mark.timeout(1800)
def test_torchrun_carries_a_run_through_twenty_deaths(tmp_path: Path, survived: Callable[[str, int, str], None]):
    make_shards(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    assert launch(tmp_path, "run.name=never_stopped").wait() == 0, (tmp_path / "stderr").read_text()
    launcher, killed, at = launch(tmp_path), [], 20
    while len(killed) < KILLS and launcher.poll() is None:
        time.sleep(0.01)
        beat = read_heartbeats(tmp_path / "runs/tiny/heartbeats").get(len(killed) % 2)
        if beat and beat.phase == "training" and beat.step >= at and beat.pid not in killed:
            os.kill(beat.pid, signal.SIGKILL)
            killed.append(beat.pid)
            at = beat.step + 20
    said = lambda: (tmp_path / "stderr").read_text()
    assert launcher.wait() == 0, said()
    lost = [int(pid) for pid in re.findall(r"^error: rank \d \(.*, pid (\d+)\) was lost", said(), re.MULTILINE)]
    assert lost == killed
    assert len(killed) == KILLS
    assert curve(tmp_path / "runs/tiny") == curve(tmp_path / "runs/never_stopped")
    survived("rank killed under torchrun --max-restarts", KILLS, "named, started again, bit-exact")
