"""Multiple choice: both accuracies, malformed files. The harness's prompts and scores are in tests/unit/interop."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import scored

from tost_lm.data.tokenizers import SentencePieceTokenizer
from tost_lm.errors import DataError
from tost_lm.inference.requests import Likelihoods

HELLASWAG = {
    "ind": 1, "activity_label": "Baking", "ctx_a": "[header] How to bake [title] It is hot.", "ctx_b": "THE cake",
    "endings": ["is  good. ", "[substeps] runs.", "is short", "no"], "label": "2", "split": "val",
}  # fmt: skip
ARC = {
    "id": "Q1", "question": "Which is short?", "answerKey": "3",
    "choices": {"text": ["a page", "a line", "no"], "label": ["1", "2", "3"]},
}  # fmt: skip
PIQA = {"goal": "To bake,", "sol1": "use a page.", "sol2": "use it", "label": 0}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_long_question_loses_its_beginning(tokenizer, tmp_path: Path):
    path = write(tmp_path / "file", PIQA | {"goal": "To bake it, " * 20})
    [example] = scored("piqa@lm-eval").examples(path, tokenizer, 16)
    assert [request.inputs for request in example.requests] == [16, 16]
    for request in example.requests:
        context, target = (tokenizer.decode(ids.tolist()) for ids in request)
        assert context.endswith("\nAnswer:")
        assert target in (" use a page.", " use it")


def test_accuracies_chance_and_standard_errors(tokenizer, tmp_path: Path):
    four = ARC | {"choices": {"text": ["aaaaaa", "bb", "cc", "dd"], "label": ["A", "B", "C", "D"]}, "answerKey": "A"}
    protocol = scored("arc_challenge@lm-eval")
    examples = protocol.examples(write(tmp_path / "file", four, four, ARC), tokenizer, 100)
    nats = [[6.0, 5.0, 7.0, 8.0], [6.0, 7.0, 7.0, 7.0], [6.0, 6.0, 1.0]]
    rows = [
        protocol.row(example, Likelihoods(np.array(each), np.ones(len(each), int), np.zeros(len(each), bool)))
        for example, each in zip(examples, nats, strict=True)
    ]
    assert [(row["chosen"], row["normalized_chosen"]) for row in rows] == [(1, 0), (0, 0), (2, 2)]
    assert rows[0]["nats"] == nats[0]
    totals = protocol.totals(rows)
    assert totals == pytest.approx({
        "examples": 3,
        "accuracy": 2 / 3,
        "accuracy_standard_error": math.sqrt(2 / 3 * 1 / 3 / 2),
        "normalized_accuracy": 1.0,
        "normalized_accuracy_standard_error": 0.0,
        "chance": (1 / 4 + 1 / 4 + 1 / 3) / 3,
    })  # fmt: skip
    assert protocol.totals(rows[:1])["accuracy_standard_error"] is None


ROWS = {"hellaswag": HELLASWAG, "arc_easy": ARC, "arc_challenge": ARC, "piqa": PIQA}


@pytest.mark.parametrize(
    ("data_set", "row", "problem"),
    [
        ("hellaswag", {**HELLASWAG, "ctx_b": None}, "ctx_b: input should be a valid string; give HellaSwag's"),
        ("hellaswag", {**HELLASWAG, "label": 4}, "the answer '4' is none of 0, 1, 2, 3; "),
        ("hellaswag", {**HELLASWAG, "endings": ["one"]}, "1 choices with 1 labels; "),
        ("arc_easy", {**ARC, "answerKey": "C"}, "the answer 'C' is none of 1, 2, 3; give ARC-Easy's test set from"),
        ("arc_challenge", {**ARC, "choices": {"text": ["a", "b"], "label": ["1"]}}, "2 choices with 1 labels; "),
        ("piqa", {**PIQA, "label": -1}, "the answer '-1' is none of 0, 1; give PIQA's validation set from the hub"),
    ],
)
def test_malformed_questions_are_rejected(tokenizer, tmp_path: Path, data_set: str, row: Any, problem: str):
    with pytest.raises(DataError) as error:
        scored(f"{data_set}@lm-eval").examples(write(tmp_path / "file", ROWS[data_set], row), tokenizer, 100)
    assert f"file, line 2: {problem}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_choice_without_a_token_is_rejected(tokenizer, tmp_path: Path):
    class Stripping(SentencePieceTokenizer):
        """Drops white space at the end of a text."""

        def encode(self, text: str) -> list[int]:
            return super().encode(text.rstrip())

    path = write(tmp_path / "file", {**PIQA, "sol2": ""})
    with pytest.raises(DataError, match="file, line 1: a choice without a token; remove the line"):
        scored("piqa@lm-eval").examples(path, Stripping(tokenizer.model_bytes), 100)
