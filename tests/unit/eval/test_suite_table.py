"""Suites of evaluations: settings of their programs, checks before the first of them, and the table of results."""

import json
from importlib import import_module
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.cli.main import MODULES
from tost_lm.config import load_config, recipes, validate
from tost_lm.errors import ConfigError, TostError
from tost_lm.eval.protocols import find_protocol
from tost_lm.eval.settings import HeldoutConfig, TextConfig
from tost_lm.eval.suite import HEADER, check_steps, write_suite
from tost_lm.eval.suite_settings import PROGRAMS, Step, SuiteConfig, steps_of
from tost_lm.inference.protocol_names import HELDOUT
from tost_lm.inference.subject import Subject, write_result_file

LAMBADA, WIKITEXT, PIQA = "lambada_openai@lm-eval", "wikitext2@hf-stride1024", "piqa@lm-eval"
EVERYTHING = {
    "zero_shot": {"protocols": [HELDOUT, LAMBADA, LAMBADA]},
    "sets": {"lambada_openai": "lambada's file.jsonl"},
    "heldout": {"shards": "some", "max_documents": 3},
    "retrieval": {"samples": 2, "haystack": "book.txt"},
    "needle": {"depths": [0.0, 1e-05]},
    "context": {},
    "positions": {"times": 2},
    "text": {"file": "a b.txt"},
    "launch": {"ranks": 2},
    "parallel": {"sequence": 2},
}


def suite(tree: dict[str, Any]) -> list[Step]:
    return steps_of(validate(SuiteConfig, tree, "suite.toml"))


def test_each_program_gets_its_own_settings_on_its_command_line():
    steps = suite(EVERYTHING)
    assert [step.section for step in steps] == list(PROGRAMS)
    for step in steps:
        kind = PROGRAMS[step.section][1]
        assert load_config(kind, None, step.overrides) == step.config
        assert step.config.parallel.sequence == 2
    assert steps[0].config.heldout == HeldoutConfig(shards="some", max_documents=3)
    assert steps[1].config.heldout == TextConfig(shards="some")
    assert steps[1].config.needle.depths == [0.0, 1e-05]
    assert steps[4].config.text.file == Path("a b.txt")
    assert steps[4].overrides == ['text.file="a b.txt"', "parallel.sequence=2"]


def test_a_section_runs_its_program_with_the_defaults_of_the_program():
    [step] = suite({"retrieval": {}})
    assert (step.command, step.overrides) == ("eval retrieval", [])
    assert step.config == PROGRAMS["retrieval"][1]()


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({}, "no program to run; add a section, one of [zero_shot], [retrieval], "),
        ({"sets": {}}, "no program to run"),
        ({"retreival": {}}, "retreival: unknown key (did you mean retrieval?)"),
        ({"retrieval": {"lenghts": [1]}}, "retrieval.lenghts: unknown key (did you mean retrieval.lengths?)"),
        ({"needle": {"haystack": "x"}}, "needle.haystack: unknown key (did you mean retrieval.haystack?)"),
        ({"retrieval": {"tasks": ["vt@own-word"]}}, "'vt@own-word' is not a task (did you mean vt@own-words?)"),
        ({"context": {"tasks": ["copy@text"]}}, "'copy@text' is not a task (did you mean copying@text?)"),
        ({"text": {}}, "text.file: must be set"),
    ],
)
def test_mistakes_in_the_settings_are_one_line(tree: dict[str, Any], problem: str):
    with pytest.raises(ConfigError) as error:
        suite(tree)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["suite", "suite_demo"])
def test_the_recipes_name_existing_protocols(name: str):
    for step in steps_of(load_config(SuiteConfig, recipes()[name])):
        if step.section == "zero_shot":
            names = step.config.zero_shot.protocols
            assert [find_protocol(each).name for each in names if each != HELDOUT] == [n for n in names if n != HELDOUT]


def test_all_missing_files_are_found_before_the_first_program(run_folder: Path):
    tree = {
        "zero_shot": {"protocols": [LAMBADA, "text8@bpc", HELDOUT]},
        "sets": {"lambada_openai": "missing.jsonl"},
        "heldout": {"shards": "nowhere"},
        "retrieval": {"haystack": "missing.txt"},
        "context": {"haystack": "missing.txt"},
        "positions": {},
        "text": {"file": "missing.txt"},
    }
    with pytest.raises(TostError) as error:
        check_steps(run_folder, suite(tree))
    begins = [
        "sets.lambada_openai missing.jsonl: no such file", "sets.text8: not set", "nowhere: ",
        "retrieval.haystack missing.txt: no such file", "context.haystack missing.txt: no such file",
        "text.file missing.txt: no such file",
    ]  # fmt: skip
    lines = str(error.value).splitlines()
    assert len(lines) == len(begins)
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True)), lines

    tree = {"zero_shot": {"protocols": ["wikitext2@lm-evl"]}, "text": {"file": "missing.txt"}}
    with pytest.raises(ConfigError, match=r"is not a protocol \(did you mean wikitext2@lm-eval\?\)"):
        check_steps(run_folder, suite(tree))
    with pytest.raises(TostError, match="nowhere: no such folder"):
        check_steps(Path("nowhere"), suite({"positions": {}}))
    assert check_steps(run_folder, suite({"positions": {}, "retrieval": {}})).home == run_folder


def test_programs_that_read_no_hugging_face_model_are_rejected_for_one(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    tree = {"zero_shot": {"protocols": [HELDOUT]}, "positions": {}, "text": {"file": "x"}}
    with pytest.raises(TostError) as error:
        check_steps(tmp_path, suite(tree))
    lines = str(error.value).splitlines()
    assert "has no shards; choose other zero_shot.protocols" in lines[0]
    assert [line.partition("leave out ")[2] for line in lines[1:]] == ["[positions]", "[text]"]


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
    baselines = [{"name": "byte unigram", "bits_per_byte": 4.0}, {"name": "byte trigram", "bits_per_byte": 3.0}]
    totals = {"bits_per_byte": 2.5, "bits_per_byte_standard_error": 0.02, "documents": 12}
    write(run_folder, HELDOUT, model=totals, baselines=baselines, headline="bits_per_byte", window_tokens=16)
    buckets = [
        {"end": end, "nats_per_token": nats, "standard_error": error, "trained": end < 100}
        for end, nats, error in ((8, 6.0, 0.1), (64, 5.5, 0.1), (512, 5.25, None))
    ]
    write(run_folder, "positions", by_position=buckets, sequences=2)
    totals = {"bits_per_byte": 1.5, "bits_per_byte_standard_error": 0.0, "examples": 1}  # the bootstrap of one example
    write(run_folder, "enwik8@bpb", model=totals, headline="bits_per_byte", **of_set)
    write(run_folder, "text@bpb", model={"bits_per_byte": 2.0, "tokens": 1234})
    protocols = [LAMBADA, WIKITEXT, PIQA, "enwik8@bpb", HELDOUT]
    steps = suite(
        {"zero_shot": {"protocols": protocols}, "context": {"tasks": ["copying@text"]}, "positions": {},
         "text": {"file": "book.txt"}}
    )  # fmt: skip
    page = write_suite(Subject.find(run_folder), steps, {"eval context": 2}, "runs/tiny")
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
        ["enwik8@bpb", "bits per byte", "1.5000 (no standard error)", "–", "1", "1,024",
         "GPT-2 117M: 1.16 (GPT-2 paper (Radford et al. 2019))", "no: their detokenizers were not released"],
        [HELDOUT, "bits per byte", "2.5000 ± 0.0200", "byte trigram 3.0000", "12", "16", "–",
         "no: the text is our own"],
        ["copying@text", "–", "tost eval context failed (exit code 2)", "–", "–", "–", "–", "–"],
        ["positions", "nats per token", "5.5000 ± 0.1000", "–", "2", "up to 64, within the trained length", "–",
         "no: the text is our own"],
        ["positions", "nats per token", "5.2500 (no standard error)", "–", "2", "up to 512, beyond the trained length",
         "–", "no: the text is our own"],
        ["text@bpb", "bits per byte", "2.0000 (no standard error)", "–", "1", "1,234", "–", "no: the text is our own"],
    ]  # fmt: skip
    assert "- `tost eval text runs/tiny 'text.file=\"book.txt\"'`" in text
    html = page.read_text()
    assert html.count("<tr>") == 1 + len(cells_of(text))
    assert "<title>Evaluation of run</title>" in html
    before = page.read_bytes()
    assert write_suite(Subject.find(run_folder), steps, {"eval context": 2}, "runs/tiny").read_bytes() == before


def test_a_length_of_a_needle_has_the_mean_over_all_depths_and_its_error(run_folder: Path):
    """With equally many examples the mean of the depths is that of all examples, and errors add in squares."""
    right = {0.0: [1, 0, 1, 1], 1.0: [0, 0, 1, 0]}
    error = {depth: stdev(own) / 2 for depth, own in right.items()}
    cells = [
        {"length": 64, "depth": depth, "samples": 4, "choice_accuracy": mean(own),
         "choice_accuracy_standard_error": error[depth], "control_choice_accuracy": 0.25,
         "control_choice_accuracy_standard_error": None}
        for depth, own in right.items()
    ]  # fmt: skip
    write(run_folder, "needle@words", cells=cells, chance=0.1)
    write_suite(Subject.find(run_folder), suite({"retrieval": {}}), {}, "runs/tiny")
    [row] = cells_of((run_folder / "eval/suite.md").read_text())
    expected = (error[0.0] ** 2 + error[1.0] ** 2) ** 0.5 / 2
    assert row == [
        "needle@words", "choice accuracy", f"50.00% ± {expected:.2%}", "chance 10.00%, control 25.00%", "8", "64", "–",
        "no: the sentences are our own",
    ]  # fmt: skip


def test_the_table_repeats_the_results_of_the_programs(run_folder: Path, make_model, tokenizer):
    model = make_model("D", tokenizer.vocab_size, 400, positions="none")
    write_checkpoint(run_folder / "checkpoints/step_00000200", model.config, model.state_dict(), tokenizer)
    goals = [{"goal": "Page", "sol1": "one", "sol2": "two lines", "label": label} for label in (0, 1, 1)]
    (run_folder / "piqa.jsonl").write_text("".join(json.dumps(goal) + "\n" for goal in goals))
    (run_folder / "text.txt").write_text("Page 7. The lines of this page are short.\n" * 5)
    samples = {"samples": 3, "samples_folder": str(run_folder / "samples")}
    steps = suite(
        {
            "zero_shot": {"protocols": [PIQA, HELDOUT]},
            "sets": {"piqa": str(run_folder / "piqa.jsonl")},
            "heldout": {"max_documents": 3},
            "retrieval": {"tasks": ["vt@own-words"], "lengths": [350], **samples},
            "context": {"tasks": ["copying@text"], "lengths": [60], "target_tokens": 6, **samples},
            "positions": {"times": 1, "sequences": 2},
            "text": {"file": str(run_folder / "text.txt")},
        }
    )
    subject = check_steps(run_folder, steps)
    for step in steps:
        import_module(MODULES[step.command]).main(run_folder, step.config)
    write_suite(subject, steps, {}, "runs/tiny")
    rows = {(row[0], row[1]): row[2:6] for row in cells_of((run_folder / "eval/suite.md").read_text())}
    found = {task: json.loads((run_folder / f"eval/{task}/results.json").read_text()) for task, _ in rows}

    piqa, heldout, text = (found[task]["model"] for task in (PIQA, HELDOUT, "text@bpb"))
    accuracy, error = piqa["accuracy"], piqa["accuracy_standard_error"]
    assert rows[PIQA, "accuracy"] == [f"{accuracy:.2%} ± {error:.2%}", "chance 50.00%", "3", "400"]
    bits, error = heldout["bits_per_byte"], heldout["bits_per_byte_standard_error"]
    assert rows[HELDOUT, "bits per byte"][0] == f"{bits:,.{digits(bits)}f} ± {error:,.{digits(bits)}f}"
    bits = text["bits_per_byte"]
    assert rows["text@bpb", "bits per byte"][0] == f"{bits:,.{digits(bits)}f} (no standard error)"
    [cell] = found["vt@own-words"]["cells"]
    share, error = cell["found_share"], cell["found_share_standard_error"]
    assert rows["vt@own-words", "found share"][0] == f"{share:.2%} ± {error:.2%}"
    [cell] = found["copying@text"]["cells"]
    gain, error = cell["gain_over_control"], cell["gain_over_control_standard_error"]
    assert rows["copying@text", "gain over control (nats per token)"][0] == f"{gain:.4f} ± {error:.4f}"
    last = found["positions"]["by_position"][-1]
    nats, error = last["nats_per_token"], last["standard_error"]
    assert rows["positions", "nats per token"][0] == f"{nats:,.{digits(nats)}f} ± {error:,.{digits(nats)}f}"


def digits(value: float) -> int:
    return 4 if value < 10 else 2
