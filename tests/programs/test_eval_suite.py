"""`tost eval suite` on a trained run: interruption, resume, a program that fails, and the table of all results."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked import LIMIT_S, Forked
from programs import refusal, run, snapshot

from tost_lm.markdown import format_result

SUITE = """
[zero_shot]
protocols = ["lambada_openai@lm-eval", "wikitext2@hf-stride65"]
[sets]
lambada_openai = "lambada.jsonl"
wikitext2 = "wiki.test.raw"
[context]
tasks = ["passages@own-words"]
passages = [1, 2, 40]
samples = 60
"""
LAMBADA, WIKITEXT = "lambada_openai@lm-eval", "wikitext2@hf-stride65"
PASSAGES = "passages@own-words"


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/tiny, a model without a maximum length, a test set and a suite."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "out").symlink_to(prepared / "out")
    (folder / "suite.toml").write_text(SUITE)
    texts = ["some words of a text, and a word", "a long text and words", "it said words"]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "wiki.test.raw").write_text(" \n = Title = \n \n" + " Some words , of a text . \n" * 20)
    words = ["model.positions=sinusoidal", "model.tssa.denom_bias=head", "train.steps=2"]
    run("tost train", prepared / "run.toml", *words, cwd=folder)
    return folder


@pytest.mark.slow
def test_a_suite_that_is_interrupted_resumes_and_writes_one_table(trained: Path):
    """The first program fails after its first protocol. Ctrl-C ends the second one after its first cell."""
    home = trained / "runs/tiny/eval"
    suite = Forked("tost eval suite", "runs/tiny", "suite.toml", cwd=trained)
    deadline = time.monotonic() + LIMIT_S / 2
    while not list(home.glob(f"{PASSAGES}/cells/length_*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    suite.send_signal(signal.SIGINT)
    code, out, errors = suite.finish()
    assert code == 130, errors
    failure, *others = filter(None, errors.splitlines())
    assert failure.startswith(f"error: {WIKITEXT}: the stride is longer than a window of 64 tokens")
    assert others == ["interrupted; run the same command to resume"]
    assert "[1/2] tost eval zero-shot runs/tiny/checkpoints/step_00000002 " in out
    assert "[2/2] tost eval context runs/tiny/checkpoints/step_00000002 " in out
    finished = snapshot(home)
    assert f"{LAMBADA}/results.json" in finished
    assert not {f"{PASSAGES}/results.json", "suite.md", "suite.html"} & finished.keys()

    suite = Forked("tost eval suite", "runs/tiny", "suite.toml", "context.passages=[1, 2]", cwd=trained)
    code, out, errors = suite.finish()
    assert code == 2
    assert errors == f"{failure}\nerror: tost eval zero-shot: exit code 2; run the same command to resume\n"
    assert out.count(f"/{LAMBADA}/results.json (same checkpoint") == out.count(f"{PASSAGES}: reusing ") == 1
    after = snapshot(home)
    assert {name: after[name] for name in finished} == finished

    lines = [line for line in after["suite.md"].decode().splitlines() if line.startswith("|")]
    rows = [[cell.strip().replace("\\", "") for cell in line.split("|")[1:-1]] for line in lines[2:]]
    failed = "tost eval zero-shot failed (exit code 2)"
    assert [(row[0], row[2]) for row in rows[:2]] == [(LAMBADA, failed), (WIKITEXT, failed)]
    cells = json.loads(after[f"{PASSAGES}/results.json"])["cells"]
    assert [cell["passages"] for cell in cells] == [1, 2]
    assert [row[1:6] for row in rows[2:]] == [row for cell in cells for row in rows_of(cell)]
    assert after["suite.html"].decode().count("<tr>") == 1 + len(rows)


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


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["suite.toml", "retrieval.lenghts=[64]"], "retrieval.lenghts: unknown key (did you mean retrieval.lengths?)"),
        (["suit.toml"], "suit.toml: no such configuration file (did you mean suite.toml?)"),
        (["suite.toml", "sets.lambada_openai=nowhere"], "sets.lambada_openai nowhere: no such file"),
        (["suite.toml", 'zero_shot.protocols=["heldout@bp"]'], "'heldout@bp' is not a protocol (did you mean heldout@"),
        ([], "CONFIG is missing; write tost eval suite RUN CONFIG before any section.key=value"),
    ],
)
def test_a_mistake_is_one_line_and_runs_nothing(trained: Path, words: list[str], problem: str):
    before = snapshot(trained / "runs")
    output = refusal("tost eval suite", "runs/tiny", *words, cwd=trained)
    assert problem in output
    assert "\n" not in output
    assert snapshot(trained / "runs") == before


def test_a_launcher_is_rejected(trained: Path):
    assert refusal("tost eval suite", "runs/tiny", "suite.toml", cwd=trained, RANK="0", WORLD_SIZE="2") == (
        "tost eval suite starts the ranks itself; run it without a launcher, with launch.ranks=N"
    )
