"""Test sets during training: the results of `tost eval`, the weights of a run without them, and mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import refusal, results, run, snapshot, weights

from tost_lm.files import read_rows
from tost_lm.markdown import format_result
from tost_lm.testing import FLOAT32_REORDERED

PAGES = "".join(f" = Page {number} = \n \n" + " Some words , of a text . \n" * (3 + 2 * number) for number in range(3))
TASKS = ["wikitext2@lm-eval", "lambada_openai@lm-eval"]


@pytest.fixture
def words(workplace: Path) -> list[str]:
    """A recipe with two test sets, measured after steps 2, 4, … 8."""
    (workplace / "wiki.test.raw").write_text(PAGES)
    texts = ["some words of a text, and a word", "a long text " * 40 + "and words", "it said words"]
    (workplace / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [
        "run.toml", "train.steps=8", "evaluation.interval=2", f"evaluation.tasks={json.dumps(TASKS)}",
        "evaluation.sets.wikitext2=wiki.test.raw", "evaluation.sets.lambada_openai=lambada.jsonl",
    ]  # fmt: skip


def rows(workplace: Path) -> list[dict[str, Any]]:
    return read_rows(workplace / "runs/tiny/evaluations.jsonl")


def assert_as_afterwards(workplace: Path) -> None:
    """The rows of the last step have the totals of `tost eval` for the last checkpoint."""
    sets = ["sets.wikitext2=wiki.test.raw", "sets.lambada_openai=lambada.jsonl"]
    run("tost eval", "runs/tiny", *TASKS, *sets, cwd=workplace)
    for row, task in zip(rows(workplace)[-len(TASKS) :], TASKS, strict=True):
        found = results(workplace / "runs/tiny", task)
        names = {"step": 8, **{key: found[key] for key in ("protocol", "headline")}}
        names["data_sha256"] = found["identity"]["data_sha256"]
        assert {key: row.pop(key) for key in names} == names
        errors = {key for key in row if key.endswith("_standard_error")}  # from differences, which lose precision
        for key, figure in found["model"].items():
            assert row.pop(key) == pytest.approx(figure, rel=1e-4 if key in errors else FLOAT32_REORDERED), key
        assert row == {}


@pytest.mark.quick
def test_results_equal_those_of_zero_shot_and_weights_are_unchanged(workplace: Path, words: list[str]):
    output = run("tost train", *words, cwd=workplace)
    assert [(row["step"], row["protocol"]) for row in rows(workplace)] == [
        (step, protocol) for step in (2, 4, 6, 8) for protocol in TASKS
    ]
    assert_as_afterwards(workplace)
    log = (workplace / "runs/tiny/log.txt").read_text()
    last = rows(workplace)[-2]
    line = f"step 8/8  wikitext2@lm-eval  word perplexity {format_result('word_perplexity', last)}\n"
    assert line in log
    assert line in output
    assert "scoring" not in output
    card = (workplace / "runs/tiny/checkpoints/step_00000008/README.md").read_text()
    assert f"| word perplexity | {format_result('word_perplexity', last)} | during training, step 8, test set " in card
    run("tost train", "run.toml", "train.steps=8", "run.name=without", cwd=workplace)
    assert (workplace / "runs/without/evaluations.jsonl").read_text() == ""
    assert weights(workplace, "tiny") == weights(workplace, "without")


OTHERS = {
    "needle": {"lengths": [64], "samples": 3, "depths": [0.5], "keys": 1},
    "positions": {"times": 1, "sequences": 2},
    "text": {"file": "text.txt"},
    "heldout": {"max_documents": 2},
}
HEADLINES = {"needle@keys": "choice_accuracy", "positions": "nats_per_token", "text@bpb": "bits_per_byte"}
HEADLINES["heldout@bpb"] = "bits_per_byte"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_other_tasks_equal_those_of_the_checkpoint(workplace: Path, ranks: int):
    (workplace / "text.txt").write_text("some words of a text\n")
    given = [f"{name}.{key}={json.dumps(value)}" for name, own in OTHERS.items() for key, value in own.items()]
    words = ["run.toml", "train.steps=4", "evaluation.interval=4", f"evaluation.tasks={json.dumps(list(OTHERS))}"]
    words += [*(f"evaluation.settings.{setting}" for setting in given), "parallel.zero_stage=2"]
    run("tost train", *words, cwd=workplace, ranks=ranks)
    run("tost eval", "runs/tiny", *OTHERS, *given, cwd=workplace)
    for row in rows(workplace):
        found = results(workplace / "runs/tiny", row["protocol"])
        if row["protocol"] == "needle@keys":
            expected = found["cells"][0]["choice_accuracy"]
        elif row["protocol"] == "positions":
            expected = found["by_position"][-1]["nats_per_token"]
        else:
            expected = found["model"]["bits_per_byte"]
        assert row["headline"] == HEADLINES[row["protocol"]]
        assert row[row["headline"]] == pytest.approx(expected, rel=1e-4)
    assert [row["protocol"] for row in rows(workplace)] == list(HEADLINES)


def test_a_resumed_run_measures_no_step_twice(workplace: Path, words: list[str]):
    run("tost train", *words, "run.stop_at_step=6", cwd=workplace)
    before = rows(workplace)
    assert [row["step"] for row in before] == [2, 2, 4, 4, 6, 6]
    (workplace / "runs/tiny/checkpoints/step_00000006/manifest.json").unlink()
    run("tost train", *words, "evaluation.interval=3", "memory.tile_tokens=8", cwd=workplace)  # from step 4
    assert rows(workplace)[:4] == before[:4]
    assert [row["step"] for row in rows(workplace)[4:]] == [6, 6, 8, 8]
    assert_as_afterwards(workplace)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ('evaluation.tasks=["text"]', "text.file: must be set; give a UTF-8 text"),
        ("evaluation.sets.wikitext2=nowhere", "evaluation.sets.wikitext2 nowhere: no such file"),
        ("evaluation.settings.zero_shot.batch_tokens=0", "zero_shot.batch_tokens: "),
    ],
)
def test_mistakes_are_one_line_before_anything_is_trained(
    workplace: Path, words: list[str], override: str, problem: str
):
    output = refusal("tost train", *words, override, cwd=workplace)
    assert problem in output
    assert "\n" not in output
    assert snapshot(workplace).keys() == {"run.toml", "wiki.test.raw", "lambada.jsonl"}
