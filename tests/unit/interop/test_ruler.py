"""RULER's prompts, texts and scores are those of the harness."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluations import evaluate

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import TostError
from tost_lm.inference.evaluated import read_result_file
from tost_lm.interop.hf import fast_tokenizer
from tost_lm.tasks.registry import find_task

LENGTH, SAMPLES = 700, 2


@pytest.fixture
def sizes(tokenizer: Tokenizer, tmp_path: Path) -> str:
    """The folder of the tokenizer for the Hugging Face library."""
    fast = fast_tokenizer(tokenizer)
    assert fast is not None
    fast.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_prompts_and_scores_are_those_of_the_harness(make_export: Callable[..., Path], sizes: str):
    pytest.importorskip("wonderwords", reason="run pip install 'lm_eval[ruler]'")
    from lm_eval.evaluator import simple_evaluate

    import tost_lm.eval.lm_eval  # registers the model  # noqa: F401

    folder = make_export(positions="none", tssa={"denom_bias": "head"})
    plain = Path(sizes, "tokenizer_config.json").read_text()
    Path(sizes, "mine.py").write_text("raise RuntimeError('the code of the folder runs')")
    foreign = json.loads(plain) | {"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    Path(sizes, "tokenizer_config.json").write_text(json.dumps(foreign))
    evaluate(folder, "niah_single_1@lm-eval", ruler={"tokenizer": sizes, "lengths": [LENGTH], "samples": SAMPLES})
    Path(sizes, "tokenizer_config.json").write_text(plain)  # the harness runs such code
    found: Any = simple_evaluate(
        "tost_lm", f"pretrained={folder},tokenizer={sizes},max_length={2 * LENGTH}", ["niah_single_1"],
        limit=SAMPLES, metadata={"max_seq_lengths": [LENGTH]},
    )  # fmt: skip
    cell = read_result_file(folder / f"eval/niah_single_1@lm-eval/lengths/{LENGTH:08d}.json")
    assert cell is not None
    totals = find_task("niah_single_1@lm-eval")[1].totals_of({"cells": [cell]})
    assert totals == {"samples": SAMPLES, "found_share_at_700": 0, "found_share": 0, "found_share_standard_error": 0}
    assert cell["found_share"] == found["results"]["niah_single_1"][f"{LENGTH},none"]
    for row, sample in zip(cell["examples"], found["samples"]["niah_single_1"], strict=True):
        prompt = sample["arguments"][0][0]
        assert prompt.endswith(row["question"])
        assert row["references"] == sample["doc"]["outputs"]
        assert row["generated"].replace("\ufffd", "") == sample["resps"][0][0].replace("\ufffd", "")


def test_mistakes_are_one_line(make_export: Callable[..., Path]):
    with pytest.raises(TostError, match=r"^ruler\.tokenizer: must be set; give the name or folder of a tokenizer"):
        evaluate(make_export(), "niah_single_1@lm-eval")
