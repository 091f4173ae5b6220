"""SIGTERM in an evaluation: it ends within a model call with exit code 143 and resumes, on one rank and on several."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Forked, as_rank, free_port
from programs import run, snapshot, write_corpus

STARTED_S, STOPPED_S = 120, 60
"""Generous limits, which only catch a hang."""
NEEDLE = ["needle.lengths=[640, 768, 900]", "needle.depths=[0.5]", "needle.samples=301"]
TASKS = {
    "heldout": ([], "scoring"),
    "text": (["text.file=long.jsonl"], "scoring"),
    "positions": (["positions.times=4000", "positions.sequences=4"], "reading"),
    "needle": (NEEDLE, "needle@keys: 640 tokens"),
}
SIGTERM_IN_DELETION = """
import os, signal, time
from tost_lm.parallel.graceful_stop import terminable

class Deleted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

def main(path, config):
    Deleted()
    time.sleep(60)

terminable(main)(None, None)
"""


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/tiny, a model without a maximum length, and texts that take it much longer than a second."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder / "long.jsonl", documents=20, words=20_000)
    for program in ("tost prepare tokenizer", "tost prepare shards"):
        run(program, prepared / "data.toml", "corpus.source=long.jsonl", "corpus.valid_fraction=0.5", cwd=folder)
    words = ["model.positions=none", "model.tssa.denom_bias=head", "train.steps=2"]
    run("tost train", prepared / "run.toml", *words, cwd=folder)
    return folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """The same, to change."""
    shutil.copytree(trained, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def terminate(task: str, words: list[str], folder: Path, started: str, signaled: list[int], ranks: int) -> None:
    """Send SIGTERM to the ranks in `signaled` soon after rank 0 has printed `started`. All ranks must end together."""
    port = free_port()
    places = [as_rank(rank, ranks, port, ranks_per_node=ranks) if ranks > 1 else {} for rank in range(ranks)]
    processes = [Forked("tost eval", "runs/tiny", task, *words, cwd=folder, **place) for place in places]
    deadline = time.monotonic() + STARTED_S
    while started not in processes[0].output() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    for rank in signaled:
        processes[rank].send_signal(signal.SIGTERM)
    codes, _, errors = zip(*[process.finish(STOPPED_S) for process in processes], strict=True)
    assert codes == (143,) * ranks, errors
    text = "".join(errors)
    assert text.count("terminated by SIGTERM; run the same command again to resume\n") == 1
    assert "error: " not in text
    assert "Traceback" not in text


@pytest.mark.parametrize("task", [*list(TASKS)[:-1], pytest.param("needle", marks=pytest.mark.slow)])
def test_sigterm_ends_one_process_with_one_line(copy: Path, task: str):
    words, started = TASKS[task]
    before = snapshot(copy / "runs").keys()
    terminate(task, words, copy, started, [0], ranks=1)
    assert all("/lengths/" in name for name in snapshot(copy / "runs").keys() - before)


def test_sigterm_while_an_object_is_deleted():
    """Python drops an exception that a handler raises there."""
    done = subprocess.run([sys.executable, "-c", SIGTERM_IN_DELETION], capture_output=True, text=True)
    assert done.returncode == 143, done.stderr
    assert done.stderr == "terminated by SIGTERM; run the same command again to resume\n"


@pytest.mark.parametrize(
    ("task", "layout", "signaled"),
    [
        ("text", "parallel.sequence=2", [1]),
        ("positions", "parallel.tensor=1", [1]),
        ("heldout", "parallel.tensor=2", [1]),
        # Copies of the model read different numbers of texts, so they call it different numbers of times.
        pytest.param("needle", "parallel.tensor=1", [0], marks=pytest.mark.slow),
        pytest.param("needle", "parallel.tensor=1", [0, 1], marks=pytest.mark.slow),
    ],
)
def test_sigterm_to_a_rank_ends_both(copy: Path, task: str, layout: str, signaled: list[int]):
    words, started = TASKS[task]
    terminate(task, [*words, layout], copy, started, signaled, ranks=2)
