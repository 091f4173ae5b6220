"""LAMBADA and CBT by the rules of the released code, against a forward pass for every token."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluations import scored
from test_golden import CBT, Bytes

from tost_lm.inference.ranks import Ranks
from tost_lm.tasks.scored import rows_of
from tost_lm.tasks.task import Row

TOKENIZER, WINDOW = Bytes(b""), 700


def measure(name: str, path: Path, model: Any, window: int = WINDOW) -> tuple[list[Row], Row]:
    task = scored(name)
    rows = rows_of(Ranks(), model, TOKENIZER, task, task.examples(path, TOKENIZER, window), 100)
    return rows, task.totals(rows)


@pytest.fixture
def model(make_model) -> Any:
    return make_model("TA", vocab_size=260, max_positions=WINDOW, seed=14).double()


@torch.inference_mode()
def generate(model: Any, prompt: str, tokens: int) -> str:
    ids = TOKENIZER.encode(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1, : TOKENIZER.vocab_size].argmax()))
    return TOKENIZER.decode(ids[-tokens:])


def test_lambada_by_substring_of_ten_generated_tokens(tmp_path: Path, model):
    passages = ["He saw it, and so he", " “They” went on and on \n", "She said so"]
    contexts = ["\nHe saw it, and so", '\n"They" went on and', "\nShe said"]
    generated = [generate(model, context, 10) for context in contexts]
    # The model writes the first word in another case, and the third as the end of a word.
    words = [generated[0][-3:].swapcase(), "nowhere", generated[2][4:6]]
    assert words[0] not in generated[0]
    assert words[2].isalpha()
    texts = [passage.rstrip().rpartition(" ")[0] + f" {word}" for passage, word in zip(passages, words, strict=True)]
    (tmp_path / "set").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rows, totals = measure("lambada_openai@tost", tmp_path / "set", model)
    assert [row["generated"] for row in rows] == generated
    assert [row["right"] for row in rows] == [True, False, True]
    assert (totals["examples"], totals["accuracy"]) == (3, pytest.approx(2 / 3))
    assert not any("perplexity" in name for name in totals)


def test_a_lambada_context_is_cut_so_that_the_new_tokens_fit(tmp_path: Path, make_model):
    model = make_model(vocab_size=260, max_positions=16).double()
    (tmp_path / "set").write_text(json.dumps({"text": "A long text with a word"}) + "\n")
    [row], _ = measure("lambada_openai@tost", tmp_path / "set", model, window=16)
    assert row["generated"] == generate(model, "\nA long text with a"[-7:], 10)


@torch.inference_mode()
def passage_nats(model: Any, ids: list[int]) -> float:
    log_probs_TV = torch.log_softmax(model(torch.tensor([[TOKENIZER.eot, *ids[:-1]]])).logits[0], -1)
    return -float(log_probs_TV[range(len(ids)), ids].sum())


@pytest.mark.parametrize("window", [WINDOW, 300])
def test_cbt_by_the_nats_of_whole_passages(tmp_path: Path, model, window: int):
    candidates = ["dog", "elephant", *"abcdefgh"]
    lines = CBT.replace("dog|a|b|c|d|e|f|g|h|i", "|".join(candidates))
    (tmp_path / "set").write_text(lines)
    before = " ".join(line.split(" ", 1)[1].strip() for line in lines.splitlines()[:20])
    passages = [TOKENIZER.encode(f"{before} Then {word} ran .") for word in candidates]
    start = max(0, len(passages[1]) - window)
    assert bool(start) == (window < WINDOW)
    expected = [passage_nats(model, ids[start:]) for ids in passages]
    [row], totals = measure("cbt_cn@tost", tmp_path / "set", model, window)
    np.testing.assert_allclose(row["nats"], expected, rtol=1e-9)
    assert row["chosen"] == candidates[int(np.argmin(expected))]
    assert (totals["accuracy"], totals["chance"]) == (float(row["chosen"] == "dog"), 0.1)
