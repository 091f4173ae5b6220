"""Running the programs as a user does: real processes, real files, from a folder of the test's own."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from forked import ENVIRONMENT, LIMIT_S, Forked, as_rank, free_port


def run(program: str, *words: object, cwd: Path, ranks: int = 0, **environment: str) -> str:
    """What a program that must succeed prints; on several ranks when `ranks` is given."""
    places = [{}]
    if ranks:
        port = free_port()
        places = [as_rank(rank, ranks, port, ranks_per_node=ranks) for rank in range(ranks)]
    started = [Forked(program, *words, cwd=cwd, **environment, **place) for place in places]
    codes, out, err = zip(*[process.finish() for process in started], strict=True)
    assert not any(codes), "".join(err)
    return "".join(out)


def refusal(program: str, *words: object, cwd: Path, **environment: str) -> str:
    """What a program that must exit with 2 says: lines of `error: …` on stderr (cut off here), no traceback."""
    code, _, err = Forked(program, *words, cwd=cwd, **environment).finish()
    assert code == 2, err
    lines = err.splitlines()
    assert lines
    assert all(line.startswith("error: ") for line in lines), err
    return "\n".join(line.removeprefix("error: ") for line in lines)


def interrupt(program: str, *words: object, cwd: Path, when: Callable[[], bool], ranks: int = 0) -> tuple[int, str]:
    """Ctrl-C, given to the whole process group as a terminal does, as soon as `when()`; exit code and stderr.

    The interpreter is a fresh one, under torchrun when `ranks` is given.
    """
    launcher = [sys.executable, "-m"]
    if ranks:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    process = subprocess.Popen(
        [*launcher, program, *map(str, words)],
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C reaches this group alone
        # A shell that runs the tests in the background has them, and what they start, ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not when() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    ended_before = process.poll() is not None
    if not ended_before:
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert not ended_before, err
    return process.returncode, err


def write_corpus(path: Path, documents: int, words: int) -> None:
    """A JSONL corpus of random words, the same each time."""
    generator = random.Random(0)
    lexicon = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(500)]
    with path.open("w") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(generator.choices(lexicon, k=words))}) + "\n")


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
