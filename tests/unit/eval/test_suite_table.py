"""Suites of tasks: their settings, checks before anything is measured, and the table of results."""

from pathlib import Path
from typing import Any

import pytest
from evaluations import evaluate

from tost_lm.config import load_config, recipes, validate
from tost_lm.errors import ConfigError, TostError
from tost_lm.eval.suite import write_suite
from tost_lm.inference.evaluated import EvaluatedCheckpoint, write_result_file
from tost_lm.tasks.heldout import NAME as HELDOUT
from tost_lm.tasks.registry import find_tasks
from tost_lm.tasks.settings import EvalConfig, tasks_of
from tost_lm.tasks.table import HEADER

LAMBADA, WIKITEXT, PIQA = "lambada_openai@lm-eval", "wikitext2@hf-stride1024", "piqa@lm-eval"


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({}, "tasks: must be set"),
        ({"tasks": []}, "tasks: list should have at least 1 item"),
        ({"tasks": ["needle"], "neeedle": {}}, "neeedle: unknown key (did you mean needle?)"),
        (
            {"tasks": ["needle"], "needle": {"lenghts": [1]}},
            "needle.lenghts: unknown key (did you mean needle.lengths?",
        ),
        ({"tasks": ["vt@own-word"]}, "'vt@own-word' is not a task (did you mean vt@own-words?)"),
        ({"tasks": ["copy@text"]}, "'copy@text' is not a task (did you mean copying@text?)"),
        ({"tasks": ["needle"], "sets": {"wikitext": "x"}}, "sets.wikitext: not a test set (did you mean wikitext2?)"),
    ],
)
def test_mistakes_in_the_settings_are_one_line(tree: dict[str, Any], problem: str):
    with pytest.raises(ConfigError) as error:
        validate(EvalConfig, tree, "suite.toml")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "count"), [("suite", 13 + 1 + 13 + 5), ("suite_demo", 1 + 1 + 2 + 5 + 1)])
def test_the_recipes_name_existing_tasks(name: str, count: int):
    assert len(tasks_of(load_config(EvalConfig, recipes()[name]))) == count


def test_all_missing_files_are_found_before_anything_is_measured(run_folder: Path):
    with pytest.raises(TostError) as error:
        evaluate(
            run_folder, LAMBADA, "owt@nanogpt", "needle", "context", "heldout", "positions", "text",
            sets={"lambada_openai": "missing.jsonl"}, heldout={"shards": "nowhere"}, needle={"haystack": "missing.txt"},
            context={"haystack": "missing.txt"}, text={"file": "missing.txt"},
        )  # fmt: skip
    begins = [
        "sets.lambada_openai missing.jsonl: no such file", "sets.owt: not set",
        "needle.haystack missing.txt: no such file", "context.haystack missing.txt: no such file", "nowhere: ",
        "text.file missing.txt: no such file",
    ]  # fmt: skip
    lines = str(error.value).splitlines()
    assert len(lines) == len(begins)
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True)), lines
    assert not list(run_folder.glob("eval/*/results.json"))
    with pytest.raises(TostError, match="nowhere: no such folder"):
        evaluate(Path("nowhere"), "positions")
    with pytest.raises(TostError, match=r"text\.file: must be set"):
        evaluate(run_folder, "text")


def test_a_task_that_fails_does_not_stop_the_others(run_folder: Path, capsys):
    (run_folder / "wiki.test.raw").write_text(" \n = Title = \n \n Some words . \n")
    (run_folder / "piqa.jsonl").write_text("{}\n")
    files = {"piqa": run_folder / "piqa.jsonl", "wikitext2": run_folder / "wiki.test.raw"}
    with pytest.raises(TostError, match=r"^piqa@lm-eval: .*piqa\.jsonl, line 1: goal: field required; give PIQA's"):
        evaluate(run_folder, PIQA, "wikitext2@lm-eval", suite=run_folder / "suite.toml", sets=files)
    piqa, wikitext, *_ = cells_of((run_folder / "eval/suite.md").read_text())
    assert piqa[:2] == [PIQA, "–"]
    assert piqa[2].startswith("failed: ")
    assert wikitext[1] == "word perplexity"


def write(run: Path, task: str, **results: Any) -> None:
    write_result_file(run / "eval" / task / "results.json", {"protocol": task, "identity": {}, **results})


def cells_of(text: str) -> list[list[str]]:
    """The cells of the table, without its header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip().replace("\\", "") for cell in line[1:-1].split("|")] for line in lines]
    assert tuple(rows[0]) == HEADER
    return rows[2:]


def test_the_table_has_every_result_with_its_error_reference_and_published_results(run_folder: Path):
    of_set = {"by_token": False, "tokenizer_is_gpt2s": False, "window_tokens": 1024, "published_file": True}
    totals = {"accuracy": 0.25, "accuracy_standard_error": 0.006, "examples": 5153, "word_perplexity": 120.5}
    write(run_folder, LAMBADA, model=totals, headline="accuracy", **of_set)
    totals = {"token_perplexity": 55.0, "token_perplexity_standard_error": 0.5, "examples": 281}
    write(run_folder, WIKITEXT, model=totals, headline="token_perplexity", **of_set | {"by_token": True})
    totals = {"accuracy": 0.6, "accuracy_standard_error": 0.01, "examples": 1838, "chance": 0.5}
    write(run_folder, PIQA, model=totals, headline="accuracy", **of_set)
    totals = {"bits_per_byte": 2.5, "bits_per_byte_standard_error": 0.02, "documents": 12}
    write(run_folder, HELDOUT, model=totals, headline="bits_per_byte", window_tokens=16)
    buckets = [
        {"end": end, "nats_per_token": nats, "standard_error": error, "trained": end < 100}
        for end, nats, error in ((8, 6.0, 0.1), (64, 5.5, 0.1), (512, 5.25, None))
    ]
    write(run_folder, "positions", by_position=buckets, sequences=2)
    totals = {
        "nats_per_token": 1.5,
        "nats_per_token_standard_error": 0.0,
        "examples": 1,
    }  # the bootstrap of one example
    write(run_folder, "owt@nanogpt", model=totals, headline="nats_per_token", **of_set)
    write(run_folder, "text@bpb", model={"bits_per_byte": 2.0, "tokens": 1234})
    tasks = find_tasks([LAMBADA, WIKITEXT, PIQA, "owt@nanogpt", HELDOUT, "copying@text", "positions", "text"])
    failed = {"copying@text": TostError("no text")}
    page = write_suite(EvaluatedCheckpoint.find(run_folder), tasks, failed)
    assert page == run_folder / "eval/suite.html"
    text = (run_folder / "eval/suite.md").read_text()
    lambada = [LAMBADA, "accuracy", "25.00% ± 0.60%", "–", "5,153", "1,024"]
    perplexity = [LAMBADA, "word perplexity", "120.50 (no standard error)", *lambada[3:]]
    tokens = "no: measured by token, and the tokenizer is not GPT-2's"
    more = [""] * 6
    assert cells_of(text) == [
        [*lambada, "GPT-2 124M: 32.56% (GPT-2's released weights)", "yes"],
        [*perplexity, "GPT-2 124M: 40.06 (GPT-2's released weights)", "yes"],
        [*more, "GPT-2 117M: 35.13 (GPT-2 paper (Radford et al. 2019))", "no: their script was not released"],
        [WIKITEXT, "token perplexity", "55.00 ± 0.50", "–", "281", "1,024",
         "GPT-2 124M: 29.94 (GPT-2's released weights)", tokens],
        [*more, "GPT-2 774M: 19.44 (Hugging Face's guide to perplexity)", tokens],
        [PIQA, "accuracy", "60.00% ± 1.00%", "chance 50.00%", "1,838", "1,024", "–", "–"],
        ["owt@nanogpt", "nats per token", "1.5000 (no standard error)", "–", "1", "1,024",
         "GPT-2 124M: 3.12 (nanoGPT, GPT-2's released weights)", "yes"],
        [HELDOUT, "bits per byte", "2.5000 ± 0.0200", "–", "12", "16", "–", "no: the text is our own"],
        ["copying@text", "–", "failed: no text", "–", "–", "–", "–", "–"],
        ["positions", "nats per token", "5.5000 ± 0.1000", "–", "2", "up to 64, within the trained length", "–",
         "no: the text is our own"],
        ["positions", "nats per token", "5.2500 (no standard error)", "–", "2", "up to 512, beyond the trained length",
         "–", "no: the text is our own"],
        ["text@bpb", "bits per byte", "2.0000 (no standard error)", "–", "1", "1,234", "–", "no: the text is our own"],
    ]  # fmt: skip
    html = page.read_text()
    assert html.count("<tr>") == 1 + len(cells_of(text))
    assert "<title>Evaluation of run</title>" in html
    before = page.read_bytes()
    assert write_suite(EvaluatedCheckpoint.find(run_folder), tasks, failed).read_bytes() == before
