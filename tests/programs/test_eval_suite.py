"""A suite on a trained run: interruption, resume, a task that fails, and the table of all results."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked import LIMIT_S, Forked
from programs import run, snapshot

from tost_lm.markdown import format_result

SUITE = """
tasks = ["lambada_openai@lm-eval", "piqa@lm-eval", "passages@own-words"]
[sets]
lambada_openai = "lambada.jsonl"
piqa = "lambada.jsonl"
[context]
passages = [1, 2, 40]
samples = 60
"""
LAMBADA, PIQA = "lambada_openai@lm-eval", "piqa@lm-eval"
PASSAGES = "passages@own-words"


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/tiny, a model without a maximum length, a test set and a suite."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "out").symlink_to(prepared / "out")
    (folder / "suite.toml").write_text(SUITE)
    texts = ["some words of a text, and a word", "a long text and words", "it said words"]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["model.positions=sinusoidal", "model.tssa.denom_bias=head", "train.steps=2"]
    run("tost train", prepared / "run.toml", *words, cwd=folder)
    return folder


@pytest.mark.slow
def test_a_suite_that_is_interrupted_resumes_and_writes_one_table(trained: Path):
    """The second task has a file of another format. Ctrl-C ends the third one after its first cell."""
    home = trained / "runs/tiny/eval"
    suite = Forked("tost eval", "runs/tiny", "suite.toml", cwd=trained)
    deadline = time.monotonic() + LIMIT_S / 2
    while not list(home.glob(f"{PASSAGES}/cells/length_*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    suite.send_signal(signal.SIGINT)
    code, _, errors = suite.finish()
    assert code == 130, errors
    assert errors.splitlines()[-1] == "interrupted; run the same command to resume"
    finished = snapshot(home)
    assert f"{LAMBADA}/results.json" in finished
    assert not {f"{PASSAGES}/results.json", "suite.md", "suite.html"} & finished.keys()

    suite = Forked("tost eval", "runs/tiny", "suite.toml", "context.passages=[1, 2]", cwd=trained)
    code, out, errors = suite.finish()
    assert code == 2
    assert errors.startswith(f"error: {PIQA}: lambada.jsonl, line 1: goal: field required; give PIQA's")
    assert errors.count("\n") == 1
    assert out.count(f"/{LAMBADA}/results.json (same checkpoint") == out.count(f"{PASSAGES}: reusing ") == 1
    after = snapshot(home)
    assert {name: after[name] for name in finished} == finished

    lines = [line for line in after["suite.md"].decode().splitlines() if line.startswith("|")]
    rows = [[cell.strip().replace("\\", "") for cell in line.split("|")[1:-1]] for line in lines[2:]]
    of_lambada = [row for row in rows if row[0] == LAMBADA]
    assert [row[1] for row in of_lambada] == ["accuracy", "word perplexity"]
    rows = rows[rows.index(of_lambada[-1]) + 2 :]
    assert rows[0][0] == PIQA
    assert rows[0][2].startswith("failed: lambada.jsonl, line 1: goal")
    rows = rows[1:]
    cells = json.loads(after[f"{PASSAGES}/results.json"])["cells"]
    assert [cell["passages"] for cell in cells] == [1, 2]
    assert [row[1:6] for row in rows] == [row for cell in cells for row in rows_of(cell)]
    assert after["suite.html"].decode().count("<tr>") == len(lines) - 1


def rows_of(cell: dict[str, Any]) -> list[list[str]]:
    """The metrics, results, controls, examples and lengths of a cell of passages."""
    choice, control, gain = (
        format_result(key, cell) for key in ("choice_accuracy", "control_choice_accuracy", "gain_over_control")
    )
    place = [f"{cell['samples']}", f"{cell['length']} (passages {cell['passages']})"]
    return [
        ["choice accuracy", choice, f"chance 10.00%, control {control}", *place],
        ["gain over control (nats per token)", gain, "–", *place],
    ]
