"""A suite on a trained run: interruption, resume, and a task that fails."""

import json
import signal
import time
from pathlib import Path

import pytest
from forked import LIMIT_S, Forked
from programs import run, snapshot

SUITE = """
tasks = ["lambada_openai@lm-eval", "piqa@lm-eval", "many_shot_seen@own-words"]
[sets]
lambada_openai = "lambada.jsonl"
piqa = "lambada.jsonl"
[context]
shots = [8, 16, 400]
samples = 60
"""
LAMBADA, PIQA = "lambada_openai@lm-eval", "piqa@lm-eval"
MANY_SHOT = "many_shot_seen@own-words"


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/tiny, a model without a maximum length, a test set and a suite."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "out").symlink_to(prepared / "out")
    (folder / "suite.toml").write_text(SUITE)
    texts = ["some words of a text, and a word", "a long text and words", "it said words"]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["model.positions=none", "model.tssa.denom_bias=head", "train.steps=2"]
    run("tost train", prepared / "run.toml", *words, cwd=folder)
    return folder


@pytest.mark.slow
def test_a_suite_that_is_interrupted_resumes(trained: Path):
    """The second task has a file of another format. Ctrl-C ends the third one after its first cell."""
    home = trained / "runs/tiny/eval"
    suite = Forked("tost eval", "runs/tiny", "suite.toml", cwd=trained)
    deadline = time.monotonic() + LIMIT_S / 2
    while not list(home.glob(f"{MANY_SHOT}/cells/length_*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    suite.send_signal(signal.SIGINT)
    code, _, errors = suite.finish()
    assert code == 130, errors
    assert errors.splitlines()[-1] == "interrupted; run the same command to resume"
    finished = snapshot(home)
    assert f"{LAMBADA}/results.json" in finished
    assert f"{MANY_SHOT}/results.json" not in finished

    suite = Forked("tost eval", "runs/tiny", "suite.toml", "context.shots=[8, 16]", cwd=trained)
    code, out, errors = suite.finish()
    assert code == 2
    assert errors.startswith(f"error: {PIQA}: lambada.jsonl, line 1: goal: field required; give PIQA's")
    assert errors.count("\n") == 1
    assert out.count(f"/{LAMBADA}/results.json (same checkpoint") == out.count(f"{MANY_SHOT}: reusing ") == 1
    after = snapshot(home)
    assert {name: after[name] for name in finished} == finished
    assert [cell["shots"] for cell in json.loads(after[f"{MANY_SHOT}/results.json"])["cells"]] == [8, 16]
