"""Scores of a copier, of guesses, and of a model against forward passes over the whole text."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluations import RETRIEVAL, STATED, secrets

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import CheckpointError
from tost_lm.tasks import answers
from tost_lm.tasks.answers import Scorer, Scores, model_scorer, score_cell
from tost_lm.tasks.haystacks import listed
from tost_lm.tasks.needle import NAME as NEEDLE
from tost_lm.tasks.queries import Queries, Query


def long_enough(task: Queries) -> int:
    return max(1500, task.needed(20) + 500)


def copier(tokenizer: Tokenizer) -> Scorer:
    """A scorer that copies the answer from the text, if it is there."""

    def score(examples: Sequence[Query], room: int) -> Scores:
        written = [read_answer(tokenizer.decode(example.prompt.tolist())) for example in examples]
        options = [[tokenizer.decode(ids) for ids in example.options] for example in examples]
        nats = np.array([[float(option != text) for option in row] for text, row in zip(written, options, strict=True)])
        generated = [tokenizer.encode(text) for text in written]
        assert max(map(len, generated)) <= room
        return Scores(nats, nats == 0, generated)

    return score


def read_answer(text: str) -> str:
    question = text.rsplit("\n", 1)[1]
    if "variables with the value" in question:
        holds: dict[str, str] = {}
        lines: list[tuple[str, str]] = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\n", text)
        for name, source in lines:
            holds[name] = holds.get(source, source)
        return "".join(listed([name for name, value in holds.items() if value == question.split()[-2]]))
    asked = re.fullmatch(rf"(?:Answer: )?{STATED} (.+?)(?: is| are)?", question)
    assert asked
    found = secrets(text)
    return "".join(listed([value for key in re.split(", | and ", asked[1]) for name, value in found if name == key]))


@pytest.mark.parametrize("name", RETRIEVAL)
def test_copying_is_right_with_the_needles_only(make_task, tokenizer, name):
    task = make_task(name)
    scores, rows = score_cell(task, copier(tokenizer), long_enough(task), task.depths[0], 5)
    assert scores["found_share"] == scores["exact_accuracy"] == 1
    assert scores["control_found_share"] == scores["control_exact_accuracy"] == scores["answer_nats"] == 0
    assert scores["control_answer_nats"] == 1
    assert [row["sample"] for row in rows] == [*range(5), *range(5)]
    assert [row["condition"] for row in rows] == ["needle"] * 5 + ["control"] * 5
    assert ("choice_accuracy" in scores) == (name == NEEDLE)


@pytest.mark.parametrize("keys", [2, 4])
def test_a_guess_among_the_words_of_the_text_scores_chance(make_task, tokenizer, keys):
    task, samples, draws = make_task(keys=keys), 300, np.random.default_rng(0)
    assert task.chance == 1 / keys

    def guess(examples: Sequence[Query], room: int) -> Scores:
        texts = [secrets(tokenizer.decode(one.prompt.tolist())) for one in examples]
        words = [tokenizer.encode(f" {found[draws.integers(len(found))][1]}") for found in texts]
        right = [[own == list(ids) for ids in one.options] for own, one in zip(words, examples, strict=True)]
        return Scores(-np.array(right, float), np.zeros((len(examples), len(examples[0].options))), words)

    scores, _ = score_cell(task, guess, 300, 0.5, samples)
    error = (task.chance * (1 - task.chance) / samples) ** 0.5
    for key in ("choice_accuracy", "found_share"):
        assert scores[key] == pytest.approx(task.chance, abs=4 * error)
        assert scores[f"control_{key}"] == 0  # the other words are in the control


def test_found_is_the_fraction_of_references_in_the_text(make_task, tokenizer):
    task = make_task("vt@own-words")

    def half_right(examples: Sequence[Query], room: int) -> Scores:
        texts = ["".join(listed([name.lower() for name in example.references[:3]])) for example in examples]
        generated = [tokenizer.encode(text) for text in texts]
        generated[0] = [*tokenizer.encode(" none"), tokenizer.eot, *generated[0]]
        return Scores(np.ones((len(examples), 1)), np.zeros((len(examples), 1), dtype=bool), generated)

    scores, rows = score_cell(task, half_right, 1500, None, 4)
    assert [row["found"] for row in rows] == [0, 0.6, 0.6, 0.6] * 2  # text after an end of text does not count
    assert scores["found_share"] == pytest.approx(0.45)
    assert rows[0]["generated"] == " none"


@pytest.mark.parametrize("pattern", ["T", "A", "TA"])
@pytest.mark.parametrize("name", [NEEDLE, "niah_single_1@own-words"])
@torch.inference_mode()
def test_scores_of_a_model_equal_passes_over_all_tokens(make_task, make_model, tokenizer, monkeypatch, name, pattern):
    task, samples = make_task(name), 3
    length, vocab_size = task.needed(samples) + 20, tokenizer.vocab_size
    monkeypatch.setattr(answers, "TILE_TOKENS", 50)
    model = make_model(pattern, vocab_size=vocab_size + 6, max_positions=length).double()
    examples = []
    for sample in range(samples):
        example, _ = task.query(length, task.depths[-1], sample)
        # One more option, of another length in each example.
        examples.append(replace(example, options=(*example.options, example.options[0][:1] * (1 + 2 * sample))))
    scores = model_scorer(model, vocab_size)(examples, task.room)
    for i, example in enumerate(examples):
        prompt = example.prompt.tolist()
        for j, ids in enumerate(example.options):
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            nats = -torch.log_softmax(logits, -1)[range(len(ids)), ids].sum().item()
            assert scores.nats[i, j] == pytest.approx(nats, rel=1e-9)
            tops = logits[:, :vocab_size].argmax(-1).tolist()
            assert scores.top_share[i, j] == np.mean([top == own for top, own in zip(tops, ids, strict=True)])
        text = list(prompt)
        for _ in range(task.room):
            text.append(int(model(torch.tensor([text])).logits[0, -1, :vocab_size].argmax()))
        assert scores.generated[i] == text[len(prompt) :]


def test_texts_are_made_in_batches(make_task, tokenizer, monkeypatch):
    monkeypatch.setattr(answers, "TOKENS_AT_ONCE", 450)
    task, read = make_task(), []

    def scorer(examples: Sequence[Query], room: int) -> Scores:
        read.append(len(examples))
        return copier(tokenizer)(examples, room)

    scores, rows = score_cell(task, scorer, 150, 0.5, 7)
    assert read == [3, 3, 3, 3, 1, 1]
    assert scores == score_cell(task, copier(tokenizer), 150, 0.5, 7)[0]
    assert [row["sample"] for row in rows] == [*range(7), *range(7)]


def test_a_generated_text_without_finite_logits_is_an_error(make_task, make_model, tokenizer):
    """Only the embedding of the first generated id is damaged, which no prompt and no answer has."""
    task = make_task("niah_single_1@own-words")
    length = task.needed(1) + 20
    model = make_model(vocab_size=tokenizer.vocab_size, max_positions=length, tied_head=False)
    scorer, example = model_scorer(model, tokenizer.vocab_size), task.query(length, None, 0)[0]
    first = scorer([example], task.room).generated[0][0]
    assert first not in {*example.prompt, *example.options[0]}
    model.embedding.weight.data[first] = torch.nan
    with pytest.raises(CheckpointError, match="the model: its logits are not finite"):
        scorer([example], task.room)
