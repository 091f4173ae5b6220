"""Comparison with published results."""

from pathlib import Path
from typing import Any

import pytest
from evaluations import scored

from tost_lm.errors import ConfigError
from tost_lm.inference.evaluated import write_result_file
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


def verdicts(text: str) -> dict[str, str]:
    """The last column of each row, by the first and the measure."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {f"{row[0]}, {row[3]}": row[-1] for row in cells if row[0] not in ("model", "---")}


def test_results_are_listed_with_published_ones_of_the_same_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    put(put(Path("a")), PAGES, headline="word_perplexity")
    text = side_by_side([Path("a")])
    assert "| a | token perplexity | 31.50 ± 0.25 | step\\_00000010 | yes |" in text
    assert "| GPT-2 124M | token perplexity | 29.94 | GPT-2's released weights | yes |" in text
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
        "no: another test set file",
        "yes",
    ]
    assert found["GPT-2 124M, GPT-2's released weights"].startswith("a: yes; b: no: windows of 512 tokens")
    words = [put(Path(name), PAGES, headline="word_perplexity", tokenizer=name) for name in "fg"]
    assert verdicts(side_by_side(words))["g, step\\_00000010"] == "yes"  # by word, so the tokenizer does not matter


def test_a_step_folder_and_a_hub_model_have_the_results_of_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    put(Path("runs/openai-community--gpt2"))
    step = put(Path("runs/tiny")) / "checkpoints/step_00000010"
    step.mkdir(parents=True)
    text = side_by_side([step, Path("hub:openai-community/gpt2")])
    assert "| hub:openai-community/gpt2 | token perplexity | 31.50" in text


def test_a_folder_without_results_is_rejected(tmp_path: Path):
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match=r"no results on test sets; run tost eval "):
        side_by_side([put(tmp_path / "a"), tmp_path / "b"])
    with pytest.raises(ConfigError, match="nowhere: no such folder; give runs, exports"):
        side_by_side([tmp_path / "nowhere"])
    (tmp_path / "a/eval" / STRIDED / "results.json").write_text("{")
    with pytest.raises(ConfigError, match=r"results\.json: damaged or edited, its hash differs"):
        side_by_side([tmp_path / "a"])


def test_published_results_have_existing_protocols():
    for row in PUBLISHED:
        assert scored(row.task).name == row.task
