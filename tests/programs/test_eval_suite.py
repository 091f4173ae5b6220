"""`tost eval suite` on a trained run: interruption, resume, a program that fails, and the table of all results."""

import json
import signal
import time
from pathlib import Path

import pytest
from forked import LIMIT_S, Forked
from programs import refusal, run, snapshot

from tost_lm.markdown import format_result

SUITE = """
[zero_shot]
protocols = ["lambada_openai@lm-eval"]
[sets]
lambada_openai = "lambada.jsonl"
[context]
tasks = ["passages@own-words"]
passages = [1, 2, 40]
samples = 60
"""
LAMBADA, PASSAGES = "lambada_openai@lm-eval", "passages@own-words"


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/tiny, a model without a maximum length, a test set and a suite."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "out").symlink_to(prepared / "out")
    (folder / "suite.toml").write_text(SUITE)
    texts = ["some words of a text, and a word", "a long text and words", "it said words"]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["model.positions=sinusoidal", "model.denom_bias=head", "train.steps=2"]
    run("tost train", prepared / "run.toml", *words, cwd=folder)
    return folder


def results(folder: Path, task: str) -> dict:
    return json.loads((folder / "runs/tiny/eval" / task / "results.json").read_text())


def test_a_suite_that_is_interrupted_resumes_and_writes_one_table(trained: Path):
    """The first program is done, and Ctrl-C ends the second one after its first cell. Later a third one fails."""
    home = trained / "runs/tiny/eval"
    suite = Forked("tost eval suite", "runs/tiny", "suite.toml", cwd=trained)
    deadline = time.monotonic() + LIMIT_S / 2
    while not list(home.glob(f"{PASSAGES}/cells/length_*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    suite.send_signal(signal.SIGINT)
    code, out, errors = suite.finish()
    assert code == 130, errors
    assert errors == "\ninterrupted; run the same command to resume\n"
    assert "[1/2] tost eval zero-shot runs/tiny/checkpoints/step_00000002 " in out
    assert "[2/2] tost eval context runs/tiny/checkpoints/step_00000002 " in out
    finished = snapshot(home)
    assert f"{LAMBADA}/results.json" in finished
    assert not {f"{PASSAGES}/results.json", "suite.md", "suite.html"} & finished.keys()

    words = ["context.passages=[1, 2]", "retrieval.lengths=[10]"]
    suite = Forked("tost eval suite", "runs/tiny", "suite.toml", *words, cwd=trained)
    code, out, errors = suite.finish()
    assert code == 2
    too_few, last = errors.splitlines()
    assert too_few.startswith("error: retrieval.lengths: 10 tokens are too few for needle@words")
    assert last == "error: tost eval retrieval: exit code 2; run the same command to resume"
    assert [line.split()[1] for line in out.splitlines() if line.startswith("[")] == ["tost"] * 3
    assert out.count(f"/{LAMBADA}/results.json (same checkpoint") == out.count(f"{PASSAGES}: reusing ") == 1
    after = snapshot(home)
    assert {name: after[name] for name in finished} == finished

    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in after["suite.md"].decode().splitlines()]
    shown = {(row[0].replace("\\", ""), row[1], row[5]): row for row in rows if len(row) == 8}
    lambada = results(trained, LAMBADA)
    assert shown[LAMBADA, "accuracy", "64"][2:5] == [format_result("accuracy", lambada["model"]), "–", "3"]
    assert shown[LAMBADA, "accuracy", "64"][7] == "no: the file is not the published one"
    assert "tost eval retrieval failed (exit code 2)" in shown["needle@words", "–", "–"]
    cells = results(trained, PASSAGES)["cells"]
    assert [cell["passages"] for cell in cells] == [1, 2]
    for cell in cells:
        length = f"{cell['length']:,} (passages {cell['passages']})"
        row = shown[PASSAGES, "choice accuracy", length]
        control = format_result("control_choice_accuracy", cell)
        assert row[2:5] == [format_result("choice_accuracy", cell), f"chance 10.00%, control {control}", "60"]
        gain = shown[PASSAGES, "gain over control (nats per token)", length]
        assert gain[2] == format_result("gain_over_control", cell)
    html = after["suite.html"].decode()
    assert html.count("<tr>") == 1 + len([row for row in rows if len(row) == 8]) - 2
    assert format_result("accuracy", lambada["model"]) in html


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
