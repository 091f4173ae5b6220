"""Run the programs as a user does: in processes, with files, in a folder of the test."""

import io
import json
import random
import subprocess
import sys
from collections.abc import Iterable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from forked import ENVIRONMENT, Forked, as_rank, free_port, module_of

from tost_lm.cli.main import main as tost
from tost_lm.files import read_rows

TINY_RUN = """
[model]
layers = 2
heads = 2
width = 16
vocab_size = 384
max_positions = 64
layer_scale = 1.0
[data]
folder = "out/shards"
[optim]
lr = 1e-2
warmup_steps = 2
[train]
steps = 12
global_batch_size = 4
micro_batch_size = 1
seq_len = 64
[checkpoint]
interval = 4
[run]
name = "tiny"
log_interval = 1
device = "cpu"
"""
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""Prints the peak memory of a command and all its processes in kB. The command inherits that of a small process."""


def run(program: str, *words: object, cwd: Path, ranks: int = 0, **environment: str) -> str:
    """The output of a program that must succeed; on several ranks if `ranks` is given."""
    environments = [environment]
    if ranks:
        port = free_port()
        environments = [environment | as_rank(rank, ranks, port, ranks_per_node=ranks) for rank in range(ranks)]
    started = [Forked(program, *words, cwd=cwd, **variables) for variables in environments]
    codes, out, err = zip(*[process.finish() for process in started], strict=True)
    assert not any(codes), "".join(err)
    return "".join(out)


def peak_memory(program: str, *words: object, cwd: Path, **environment: str) -> int:
    """Peak memory in bytes of the largest process of a program, which runs in a fresh interpreter."""
    line = [sys.executable, "-c", PEAK, sys.executable, "-m", *module_of(program, words)]
    variables = {**ENVIRONMENT, **environment}
    done = subprocess.run(line, cwd=cwd, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return 1024 * int(done.stdout.split()[-1])


def refusal(program: str, *words: object, cwd: Path, **environment: str) -> str:
    """The error lines, without `error: `, of a program that must exit with 2 and print nothing else on stderr."""
    code, _, err = Forked(program, *words, cwd=cwd, **environment).finish()
    return _error_lines(code, err)


def run_here(program: str, *words: object, cwd: Path) -> str:
    """As `run`, in this process: for programs of one rank whose imports take longer than their work."""
    code, out, err = _finished_here(program, words, cwd)
    assert code == 0, err
    return out


def refusal_here(program: str, *words: object, cwd: Path) -> str:
    """As `refusal`, in this process."""
    code, _, err = _finished_here(program, words, cwd)
    return _error_lines(code, err)


def _finished_here(program: str, words: Iterable[object], cwd: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*program.split(), *map(str, words)])
        patch.setenv("PYTHONSAFEPATH", "1")  # `tost` sets it
        with pytest.raises(SystemExit) as ended:
            tost()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def _error_lines(code: int, err: str) -> str:
    assert code == 2, err
    lines = err.splitlines()
    assert lines
    assert all(line.startswith("error: ") for line in lines), err
    return "\n".join(line.removeprefix("error: ") for line in lines)


def write_corpus(path: Path, documents: int, words: int) -> None:
    """Write a JSONL corpus of random words, the same in every call."""
    generator = random.Random(0)
    lexicon = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(500)]
    with path.open("w") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(generator.choices(lexicon, k=words))}) + "\n")


def snapshot(folder: Path) -> dict[str, bytes]:
    """The contents of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def curve(folder: Path, name: str = "tiny") -> list[tuple[float, ...]]:
    """Step, loss, gradient norm, learning rate and tokens of each step of a run."""
    rows = read_rows(folder / "runs" / name / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"], row["tokens"]) for row in rows]


def results(home: Path, task: str) -> dict[str, Any]:
    """The stored results of a task, in the folder of a run or a model."""
    return json.loads((home / "eval" / task / "results.json").read_text())


def losses(folder: Path, name: str) -> list[float]:
    return [loss for _, loss, *_ in curve(folder, name)]


def weights(folder: Path, name: str) -> dict[str, bytes]:
    """The files of weights and optimizer state of a run's newest checkpoint."""
    newest = max((folder / "runs" / name / "checkpoints").iterdir())
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def linked(prepared: Path, folder: Path) -> Path:
    """The folder, with what `write_tiny_run` made elsewhere, to run training in."""
    (folder / "out").symlink_to(prepared / "out")
    (folder / "run.toml").write_text(TINY_RUN)
    return folder


def write_tiny_run(folder: Path) -> None:
    """Make corpus.jsonl, data.toml, run.toml and out/shards."""
    write_corpus(folder / "corpus.jsonl", documents=80, words=300)
    (folder / "data.toml").write_text(
        '[corpus]\nsource = "corpus.jsonl"\nvalid_fraction = 0.1\n'
        '[tokenizer]\npath = "out/tokenizer.model"\nvocab_size = 384\n[shards]\nfolder = "out/shards"\n'
    )
    (folder / "run.toml").write_text(TINY_RUN)
    run("tost prepare tokenizer", "data.toml", cwd=folder)
    run("tost prepare shards", "data.toml", cwd=folder)
