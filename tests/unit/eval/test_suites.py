"""Suites of tasks: their settings, checks before anything is measured, and tasks that fail."""

from pathlib import Path
from typing import Any

import pytest
import torch
from evaluations import FILES, evaluate

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import load_config, recipes, validate
from tost_lm.errors import ConfigError, TostError
from tost_lm.inference import ranks
from tost_lm.tasks import answers
from tost_lm.tasks.registry import FAMILIES
from tost_lm.tasks.settings import EvalConfig, tasks_of

LAMBADA, PAGES = "lambada_openai@lm-eval", "wikitext2@lm-eval"


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
        ({"tasks": ["needle@key"]}, "'needle@key' is not a task (did you mean needle@keys?)"),
        ({"tasks": ["needle"], "sets": {"wikitext": "x"}}, "sets.wikitext: not a test set (did you mean wikitext2?)"),
    ],
)
def test_mistakes_in_the_settings_are_one_line(tree: dict[str, Any], problem: str):
    with pytest.raises(ConfigError) as error:
        validate(EvalConfig, tree, "suite.toml")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "count"), [("suite", 6 + 3), ("suite_demo", 4)])
def test_the_recipes_name_existing_tasks(name: str, count: int):
    assert len(tasks_of(load_config(EvalConfig, recipes()[name]))) == count


def test_all_missing_files_are_found_before_anything_is_measured(run_folder: Path):
    with pytest.raises(TostError) as error:
        evaluate(
            run_folder, LAMBADA, "owt@nanogpt", "needle", "association", "heldout", "positions", "text",
            sets={"lambada_openai": "missing.jsonl"}, heldout={"shards": "nowhere"}, needle={"haystack": "missing.txt"},
            association={"haystack": "gone.txt"}, text={"file": "missing.txt"},
        )  # fmt: skip
    begins = [
        "sets.lambada_openai missing.jsonl: no such file", "sets.owt: not set",
        "haystack missing.txt: no such file", "haystack gone.txt: no such file", "nowhere: ",
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


def test_a_task_that_fails_does_not_stop_the_others(run_folder: Path):
    (run_folder / "wiki.test.raw").write_text(" \n = Title = \n \n Some words . \n")
    (run_folder / "lambada.jsonl").write_text("{}\n")
    files = {"lambada_openai": run_folder / "lambada.jsonl", "wikitext2": run_folder / "wiki.test.raw"}
    with pytest.raises(TostError, match=r"^lambada_openai@lm-eval: .*lambada\.jsonl, line 1: no passage of two"):
        evaluate(run_folder, LAMBADA, PAGES, sets=files)
    assert [path.name for path in (run_folder / "eval").iterdir() if (path / "results.json").exists()] == [PAGES]


def test_weights_that_are_not_finite_fail_every_task(run_folder: Path, tokenizer, make_model, tmp_path: Path):
    """Of every family and of a user's texts; only the texts of `owt` are ids of another tokenizer."""
    step = run_folder / "checkpoints/step_00000100"
    model = make_model(vocab_size=tokenizer.vocab_size, positions="none", tssa={"denom_bias": "head"})
    model.norm.weight.data[3] = torch.nan
    write_checkpoint(step, model.config, model.state_dict(), tokenizer)
    same = {"lambada_standard": "lambada_openai"}
    texts = FILES | {name: FILES[other] for name, other in same.items()}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "text").write_text("some words of a text " * 3)
    (tmp_path / "book").write_text("Some words of a text. They say little! " * 1000)
    grid = {"depths": [0.5], "lengths": [600], "samples": 1}
    book = grid | {"haystack": str(tmp_path / "book")}
    families = [family for name, family in FAMILIES.items() if name != "ruler"]  # whose texts the harness makes
    names = [task.name.replace("1024", "8") for family in families for task in family.tasks]
    names = [name for name in names if not name.startswith("owt@")]
    with pytest.raises(TostError) as error:
        evaluate(
            run_folder, *names, "own",
            sets={name: str(tmp_path / name) for name in texts},
            zero_shot={"window_tokens": 12},
            documents={"own": {"file": str(tmp_path / "lambada_openai")}},
            needle=book, association=book, records=grid,
            text={"file": str(tmp_path / "text")}, positions={"times": 1, "file": str(tmp_path / "text")},
        )  # fmt: skip
    problem = f"{step}: its logits are not finite (NaN or infinite); use an earlier checkpoint"
    expected = [f"{name}: {problem}" for name in [*names, "own@documents"]]
    assert str(error.value).splitlines() == expected
    assert not [path for path in (run_folder / "eval").rglob("*") if path.is_file()]


def test_long_texts_have_progress(run_folder: Path, tokenizer, make_model, tmp_path: Path, monkeypatch, capsys):
    """A line a minute, within a sequence or a prompt too."""
    model = make_model(vocab_size=tokenizer.vocab_size, positions="none", tssa={"denom_bias": "head"})
    write_checkpoint(run_folder / "checkpoints/step_00000100", model.config, model.state_dict(), tokenizer)
    (tmp_path / "text").write_text("Some words of a text. They say little! " * 40)
    monkeypatch.setattr(ranks, "PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(answers, "TILE_TOKENS", 200)
    text = str(tmp_path / "text")
    (tmp_path / "wiki").write_text(FILES["wikitext2"])
    evaluate(
        run_folder, "needle", "positions", "text", PAGES, sets={"wikitext2": str(tmp_path / "wiki")},
        needle={"depths": [0.5], "lengths": [300], "samples": 1, "haystack": text},
        positions={"times": 2, "sequences": 1, "file": text}, text={"file": text},
    )  # fmt: skip
    output = capsys.readouterr().out
    for line in (
        "200 of 271 tokens of each text read", "32 of 32 tokens of a sequence read", "1 of 1 sequences read",
        "1,560 of 1,560 bytes read", "requests scored",
    ):  # fmt: skip
        assert f"{line}\n" in output
