"""Results beside published figures: what may be compared, and what not; and the record of all results."""

import json
from pathlib import Path
from typing import Any

import pytest

from tost_lm.errors import ConfigError
from tost_lm.evaluation.history import figure, record
from tost_lm.evaluation.protocols import find_protocol
from tost_lm.evaluation.published import KNOWN_OF_GPT2, PUBLISHED, is_reached
from tost_lm.evaluation.side_by_side import side_by_side

STRIDED, PAGES = "wikitext2@hf-stride1024", "wikitext2@lm-eval"


def put(home: Path, protocol: str = STRIDED, **changed: Any) -> Path:
    measure = changed.pop("headline", "token_perplexity")
    tokens = changed.pop("tokens", 287_363)
    identity = {"checkpoint": "step_00000010", "data_sha256": changed.pop("data", "d1")}
    results = {
        "protocol": protocol, "identity": identity, "headline": measure, "window": 1024, "file_is": "published",
        "model": {measure: 31.5, f"{measure}_standard_error": 0.25, "tokens": tokens}, **changed,
    }  # fmt: skip
    path = home / "eval" / protocol / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(results))
    return home


def verdicts(text: str) -> dict[str, str]:
    """The last column of each row, by the first and the measure."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {f"{row[0]}, {row[3]}": row[-1] for row in cells if row[0] not in ("model", "---")}


def test_figures_stand_beside_published_ones_of_the_same_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
        ({"window": 512}, "no: windows of 512 tokens, and 1,024 there"),
        ({"file_is": "other"}, "no: the file is not the published one"),
        ({"file_is": "unverified"}, "yes, if the file is the published one"),
        ({"tokens": 300_000}, "no: other tokens: 300,000 in the text, and 287,363 there"),
        ({"file_is": "hub:Salesforce/wikitext"}, "yes"),
    ],
)
def test_what_was_measured_otherwise_is_not_comparable(tmp_path: Path, changed: dict[str, Any], why: str):
    text = side_by_side([put(tmp_path / "a", **changed)])
    assert verdicts(text)["GPT-2 124M, GPT-2's released weights"] == why


def test_two_models_are_compared_with_the_first_and_with_published_ones_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    homes = [put(Path("a")), put(Path("b"), window=512), put(Path("c"), tokens=9), put(Path("e"), data="d2")]
    found = verdicts(side_by_side(homes))
    assert [found[f"{name}, step\\_00000010"] for name in "abce"] == [
        "yes",
        "no: windows of 512 tokens, and 1,024 in the first",
        "no: by token, and the tokenizers differ",
        "no: of another file",
    ]
    assert found["GPT-2 124M, GPT-2's released weights"].startswith("a: yes; b: no: windows of 512 tokens")
    words = [put(Path(name), PAGES, headline="word_perplexity", tokens=n) for name, n in (("f", 5), ("g", 9))]
    assert verdicts(side_by_side(words))["g, step\\_00000010"] == "yes"  # by word, whatever the tokens


def test_a_folder_without_results_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no results of test sets; python -m eval\.zero_shot"):
        side_by_side([put(tmp_path / "a"), tmp_path / "b"])
    (tmp_path / "a/eval" / STRIDED / "results.json").write_text("{")
    with pytest.raises(ConfigError, match=r"results\.json: damaged; remove it"):
        side_by_side([tmp_path / "a"])


def test_published_figures_are_of_protocols_that_are_there():
    for row in PUBLISHED:
        assert find_protocol(row.protocol).name == row.protocol
    assert len(KNOWN_OF_GPT2) == 5


def test_known_figures_are_reached_to_a_fifth_of_a_percent():
    known = KNOWN_OF_GPT2[0]
    assert is_reached(known, 29.98)
    assert not is_reached(known, 30.1)
    assert not is_reached(known, 29.8)


def test_every_result_is_kept_in_order(tmp_path: Path):
    identity = {"checkpoint": "step_00000010", "checkpoint_sha256": "c" * 64, "tokenizer_sha256": "t" * 64}
    for accuracy in (0.25, 0.5):
        totals = {"accuracy": accuracy, "accuracy_standard_error": 0.01, "examples": 5153}
        record(
            tmp_path,
            {
                "protocol": "lambada_openai@lm-eval", "identity": identity, "commit": "abc", "seconds": 2.0,
                "headline": "accuracy", "window": 1024, "file_is": "published", "model": totals, "rows": [1, 2],
            },
        )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "eval/results.jsonl").read_text().split("\n")[:-1]]
    assert [row["model"]["accuracy"] for row in rows] == [0.25, 0.5]
    assert all("rows" not in row and row["identity"] == identity and row["commit"] == "abc" for row in rows)
    header, _, first, second = (tmp_path / "eval/results.md").read_text().splitlines()
    assert header.startswith("| protocol | measure | result | examples |")
    assert first.startswith(
        "| lambada\\_openai@lm-eval | accuracy | 25.00% ± 1.00% | 5,153 | step\\_00000010 cccccccccccc |"
    )
    assert "50.00%" in second


def test_figures_have_the_digits_that_are_cited():
    assert figure("word_perplexity", {"word_perplexity": 37.372}) == "37.37"
    assert (
        figure("nats_per_token", {"nats_per_token": 3.20456, "nats_per_token_standard_error": 0.01})
        == "3.2046 ± 0.0100"
    )
