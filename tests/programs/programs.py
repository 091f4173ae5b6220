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

CHECKOUT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(CHECKOUT),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
}


def run(program: str, *words: object, cwd: Path, ranks: int = 0, **environment: str) -> str:
    """What a program that must succeed prints; under torchrun when `ranks` is given."""
    done = _finish(_start(program, words, cwd, ranks, environment))
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(program: str, *words: object, cwd: Path, **environment: str) -> str:
    """What a program that must exit with 2 says: lines of `error: …` on stderr (cut off here), no traceback."""
    done = _finish(_start(program, words, cwd, 0, environment))
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert lines
    assert all(line.startswith("error: ") for line in lines), done.stderr
    return "\n".join(line.removeprefix("error: ") for line in lines)


def interrupt(program: str, *words: object, cwd: Path, when: Callable[[], bool], ranks: int = 0) -> tuple[int, str]:
    """Ctrl-C, given to the whole process group as a terminal does, as soon as `when()`; exit code and stderr."""
    process = _start(program, words, cwd, ranks, {})
    deadline = time.monotonic() + 120
    while not when() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None, _finish(process).stderr
    os.killpg(process.pid, signal.SIGINT)
    done = _finish(process)
    return done.returncode, done.stderr


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


def _finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=200)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _start(
    program: str, words: tuple[object, ...], cwd: Path, ranks: int, environment: dict[str, str]
) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m"]
    if ranks:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return subprocess.Popen(
        [*launcher, program, *map(str, words)],
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C reaches this group alone
        # A shell that runs the tests in the background has them, and what they start, ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
