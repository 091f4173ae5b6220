"""A pipe where a file is expected: one line names it, and no program waits for a writer."""

import os
import shutil
from pathlib import Path

import pytest
from forked import Forked
from programs import run

pytestmark = pytest.mark.slow

NOT_A_FILE = "must be a regular file, not a pipe or a device"
TRAIN = ["tost train", "run.toml", "train.steps=3"]
CASES = [
    ("run.toml", TRAIN, f"run.toml: cannot be read: {NOT_A_FILE}; name a TOML file"),
    ("mixer.py", [*TRAIN, 'model.plugins=["mixer.py"]'], f"plugin mixer.py: cannot be read: {NOT_A_FILE}; name a Pyth"),
    ("shards/manifest.json", [*TRAIN, "data.folder=shards", "run.name=new"],
     f"shards/manifest.json: cannot be read: {NOT_A_FILE}; "),
    ("runs/.tiny.lock", TRAIN, f"runs/tiny: cannot be written: {NOT_A_FILE}; "),
    ("runs/tiny/events.jsonl", TRAIN, f"runs/tiny/events.jsonl: {NOT_A_FILE}"),
    ("runs/tiny/log.txt", TRAIN, f"runs/tiny/log.txt: {NOT_A_FILE}"),
    (
        "runs/tiny/checkpoints/step_00000002/manifest.json",
        ["tost generate", "runs/tiny"],
        "runs/tiny: not a checkpoint: none of its checkpoints is valid",
    ),
    ("runs/tiny/eval/sample/results.json", ["tost report", "runs/tiny"], f"eval/sample/results.json: {NOT_A_FILE}"),
    ("runs/tiny/metrics.jsonl", ["tost report", "runs/tiny"], f"runs/tiny/metrics.jsonl: {NOT_A_FILE}"),
    ("gpt2/model.safetensors", ["tost convert", "gpt2", "convert.folder=new"], f"model.safetensors: {NOT_A_FILE}"),
    (
        "tokenizer.json",
        ["tost prepare shards", "data.toml", "tokenizer.kind=hf", "tokenizer.path=tokenizer.json",
         "tokenizer.vocab_size=none", "tokenizer.eot_token='<|endoftext|>'"],
        f"tokenizer.path tokenizer.json: cannot be read: {NOT_A_FILE}; set it to",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `tiny` of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    for name in ("out", "run.toml", "data.toml", "corpus.jsonl"):
        (folder / name).symlink_to(prepared / name)
    run("tost train", "run.toml", "train.steps=3", "run.stop_at_step=2", cwd=folder)
    (folder / "gpt2").mkdir()
    sizes = '"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 9, "n_positions": 8'
    (folder / "gpt2/config.json").write_text(f'{{"model_type": "gpt2", {sizes}}}')
    return folder


@pytest.mark.parametrize(("pipe", "command", "problem"), CASES, ids=[pipe for pipe, *_ in CASES])
def test_a_pipe_in_place_of_a_file_is_one_line(
    trained: Path, tmp_path: Path, pipe: str, command: list[str], problem: str
):
    shutil.copytree(trained, tmp_path / "copy", symlinks=True)
    path = tmp_path / "copy" / pipe
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    code, _, errors = Forked(*command, cwd=tmp_path / "copy").finish(limit_s=120)
    assert code == 2, errors
    (line,) = errors.splitlines()
    assert line.startswith("error: ")
    assert problem in line
    assert path.is_fifo()
