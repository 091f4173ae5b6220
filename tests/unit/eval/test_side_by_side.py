"""Comparison with published results."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from evaluations import scored

from tost_lm.errors import ConfigError
from tost_lm.files import write_rows
from tost_lm.inference.effective_length import effective_lengths
from tost_lm.inference.evaluated import write_result_file
from tost_lm.intervals import paired, wilson
from tost_lm.tasks.published import PUBLISHED, side_by_side

STRIDED, PAGES = "wikitext2@hf-stride1024", "wikitext2@lm-eval"


def put(home: Path, protocol: str = STRIDED, **changed: Any) -> Path:
    measure = changed.pop("headline", "token_perplexity")
    identity = {"checkpoint": "step_00000010", "data_sha256": changed.pop("data", "d1")}
    identity["tokenizer_sha256"] = changed.pop("tokenizer", "t1")
    results = {
        "protocol": protocol, "identity": identity, "headline": measure, "window_tokens": 1024, "published_file": True,
        "by_token": scored(protocol).by_token, "tokenizer_is_gpt2s": True,
        "model": {measure: 31.5, f"{measure}_standard_error": 0.25, **changed.pop("figures", {})}, **changed,
    }  # fmt: skip
    write_result_file(home / "eval" / protocol / "results.json", results)
    return home


def put_needles(home: Path, choices: list[list[int]], **identity: Any) -> Path:
    """Results of a length; `choices` are those of the questions of each text."""
    settings = {"lengths": [64], "samples": len(choices), "seed": 0, "depths": [0.0, 1.0], "threshold": 0.5}
    identity = {
        "checkpoint": "step_00000010", "tokenizer_sha256": "t1", "shards_fingerprint": "s1", "settings": settings,
        **identity,
    }  # fmt: skip
    scores = [sum(own) / len(own) for own in choices]
    cell: dict[str, Any] = {"length": 64, "samples": len(choices), "choice_accuracy": sum(scores) / len(scores)}
    cell |= {"choice_accuracy_standard_error": None, "control_choice_accuracy": 0.0}
    rows = [
        {"sample": number, "condition": condition, "choice": bool(right) and condition == "needle"}
        for number, own in enumerate(choices) for right in own for condition in ("needle", "control")
    ]  # fmt: skip
    path = home / "eval/needle@keys/lengths/00000064.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result_file(path, {"identity": identity, "examples": rows})
    results = {"protocol": "needle@keys", "identity": identity, "chance": 0.25, "threshold": 0.5, "cells": [cell]}
    write_result_file(home / "eval/needle@keys/results.json", results)
    return home


def verdicts(text: str) -> dict[str, str]:
    """The last column of each row, by the first and the measure."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {f"{row[0]}, {row[4]}": row[-1] for row in cells if row[0] not in ("model", "---")}


def test_results_are_listed_with_published_ones_of_the_same_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    put(put(Path("a")), PAGES, headline="word_perplexity")
    text = side_by_side([Path("a")])
    assert "| a | token perplexity | 31.50 ± 0.25 | – | step\\_00000010 | yes |" in text
    assert "| GPT-2 124M | token perplexity | 29.94 | – | GPT-2's released weights | yes |" in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [f"## {STRIDED}", f"## {PAGES}"]
    found = verdicts(text)
    assert found["GPT-2 774M, Hugging Face's guide to perplexity"] == "yes"
    assert found["GPT-2 117M, GPT-2 paper (Radford et al. 2019)"] == "no: their detokenizers were not released"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"window_tokens": 512}, "no: windows of 512 tokens, not 1,024"),
        ({"published_file": False}, "no: the file is not the published one"),
        ({"published_file": None}, "yes, if the file is the published one"),
        ({"tokenizer_is_gpt2s": False}, "no: measured by token, and the tokenizer is not GPT-2's"),
    ],
)
def test_results_measured_differently_are_not_comparable(tmp_path: Path, changed: dict[str, Any], why: str):
    text = side_by_side([put(tmp_path / "a", **changed)])
    assert verdicts(text)["GPT-2 124M, GPT-2's released weights"] == why


def test_models_are_compared_with_the_first_and_with_published_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    other = {"tokenizer": "t2", "tokenizer_is_gpt2s": False}
    homes = [put(Path("a")), put(Path("b"), window_tokens=512), put(Path("c"), **other), put(Path("e"), data="d2")]
    homes.append(put(Path("h"), tokenizer="t3"))  # another file of GPT-2's tokenizer
    found = verdicts(side_by_side(homes))
    assert [found[f"{name}, step\\_00000010"] for name in "abceh"] == [
        "yes",
        "no: windows of 512 tokens, not 1,024 as in the first row",
        "no: measured by token, and the tokenizers differ",
        "no: another test set file or task",
        "yes",
    ]
    assert found["GPT-2 124M, GPT-2's released weights"].startswith("a: yes; b: no: windows of 512 tokens")
    words = [put(Path(name), PAGES, headline="word_perplexity", tokenizer=name) for name in "fg"]
    assert verdicts(side_by_side(words))["g, step\\_00000010"] == "yes"  # by word, so the tokenizer does not matter


def test_examples_of_two_models_are_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, nats in (("a", [3.0, 5.0, 4.0]), ("b", [2.0, 5.0, 2.0])):
        put(Path(name))
        write_rows(Path(name, "eval", STRIDED, "rows.jsonl"), [{"tokens": 2, "nats": n} for n in nats])
    put_needles(Path("a"), [[1, 1], [1, 1], [1, 1], [0, 1]])
    put_needles(Path("b"), [[1, 0], [1, 1], [1, 0], [0, 1]])
    put_needles(Path("c"), [[1, 1]] * 4, tokenizer_sha256="t2")
    text = side_by_side([Path("a"), Path("b"), Path("c")])
    assert "| b | token perplexity | 31.50 ± 0.25 | -1 nats (-2.132 to +0.1316, 3 pairs) | step" in text
    rows = [line.replace("\\", "") for line in text.splitlines() if "| choice" in line]
    assert [row.split(" | ", 3)[3].removesuffix(" |") for row in rows] == [
        "choice 87.5% (39.6% to 98.7%) | 0.0% | – | step_00000010 | yes",
        "choice 62.5% (21.9% to 90.8%) | 0.0% | -25.0% (-71.3% to +38.0%, 4 pairs) | step_00000010 | yes",
        "choice 100.0% (51.0% to 100.0%) | 0.0% | – | step_00000010 | no: the tokenizers differ, and so the questions",
    ]
    lengths = text.split("## Effective length")[1]
    assert "| a | 64 tokens (\\< 64 to 64) |" in lengths
    assert "| b | 64 tokens (\\< 64 to 64) |" in lengths


@pytest.mark.parametrize("own", [[1.0] * 8, [1.0, 1.0, 1.0, 0.0] * 2])
def test_the_interval_of_paired_scores_has_a_width_where_all_agree(own: list[float]):
    """Bonett and Price's: of the pairs and two more, a and b have one model right alone."""
    other, n = [1.0] * 8, 10
    a, b = (1 + sum(x > y for x, y in zip(*pair, strict=True)) for pair in ((own, other), (other, own)))
    found = paired(own, other, are_scores=True)
    assert found
    assert (found.mean, found.pairs) == (fmean(own) - 1, 8)
    assert (found.low + found.high) / 2 == pytest.approx((a - b) / n)
    assert found.high - found.low == pytest.approx(
        2 * 1.96 * (((a + b) / n - ((a - b) / n) ** 2) / (n - 1)) ** 0.5, rel=1e-4
    )


def test_wilsons_interval_of_known_shares():
    """Newcombe 1998, table I."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0 / 20, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert wilson(1 / 29, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_a_step_folder_has_the_results_of_its_run(tmp_path: Path):
    step = put(tmp_path / "runs/tiny") / "checkpoints/step_00000010"
    step.mkdir(parents=True)
    assert "| token perplexity | 31.50" in side_by_side([step])


def test_scores_of_two_kinds_have_an_effective_length_each():
    cell = lambda length, **score: {"length": length, "samples": 100, **score}
    needle = {"threshold": 0.5, "cells": [cell(n, choice_accuracy=1.0) for n in (64, 256)]}
    ruler = {"threshold": 0.5, "cells": [cell(n, found_share=0.0) for n in (64, 128)]}
    lengths = [(one.tasks, one.tokens) for one in effective_lengths({"needle@keys": needle, "ruler_vt@lm-eval": ruler})]
    assert lengths == [(("needle@keys",), 256), (("ruler_vt@lm-eval",), 0)]


def test_a_folder_without_results_is_rejected(tmp_path: Path):
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match=r"no results of retrieval or test sets; run tost eval "):
        side_by_side([put(tmp_path / "a"), tmp_path / "b"])
    with pytest.raises(ConfigError, match="nowhere: no such folder; give runs, exports"):
        side_by_side([tmp_path / "nowhere"])
    (tmp_path / "a/eval" / STRIDED / "results.json").write_text("{")
    with pytest.raises(ConfigError, match=r"results\.json: damaged or edited, its hash differs"):
        side_by_side([tmp_path / "a"])


def test_published_results_have_existing_protocols():
    for row in PUBLISHED:
        assert scored(row.task).name == row.task
