"""The needle task: exact lengths, repeatable, solved by whoever can copy and by nobody who guesses."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from tost_lm.config import validate
from tost_lm.errors import ConfigError, DataError
from tost_lm.evaluation.config import NeedleConfig
from tost_lm.evaluation.needle import CHANCE, ENDINGS, WORDS, NeedleTask, model_scorer, run_grid

LENGTHS = [150, 201]


@pytest.fixture
def make_task(tokenizer, shards):
    def make(max_positions: int = 256, limited: bool = True, **settings: Any) -> NeedleTask:
        config = validate(NeedleConfig, {"lengths": LENGTHS, "samples": 6, **settings}, "test")
        limit = max_positions if limited else None
        return NeedleTask(config, tokenizer, shards.documents("valid"), max_positions, limit)

    return make


def all_examples(task: NeedleTask):
    for length in task.lengths:
        for depth in task.config.depths:
            for needle, control in task.examples(length, depth):
                yield length, depth, needle, control


def tokens_of(task: NeedleTask, prompt: list[int], beginning: str) -> int:
    """How many tokens of the prompt make up its beginning, EOT among them."""
    return next(n for n in range(1, len(prompt) + 1) if task.tokenizer.decode(prompt[:n]) == beginning)


def copier(task: NeedleTask):
    """A scorer that reads the word from the text, and has no idea where it is not there."""

    def score(prompts, candidates):
        log_probs, generated = np.zeros((len(prompts), len(candidates))), []
        for row, prompt in zip(log_probs, prompts, strict=True):
            text = task.tokenizer.decode(prompt)
            question = text.rsplit("\n", 1)[1]
            found = re.search(re.escape(question) + r" (\w+)\.\n", text)
            row[WORDS.index(found[1]) if found else 0] = 1
            generated.append(task.tokenizer.encode(f" {found[1]}, I think" if found else " apples"))
        return log_probs, generated

    return score


def guesser(seed: int):
    draws = np.random.default_rng(seed)

    def score(prompts, candidates):
        return draws.normal(size=(len(prompts), len(candidates))), [candidates[0] for _ in prompts]

    return score


def test_prompt_and_longest_word_are_exactly_the_length(make_task):
    task = make_task()
    for length, _, needle, control in all_examples(task):
        assert len(needle.prompt) + max(map(len, task.candidates)) == length
        assert len(control.prompt) == len(needle.prompt)


def test_the_needle_stands_once_at_the_end_of_a_line_or_sentence(make_task):
    task = make_task()
    places: dict[tuple[int, float], list[float]] = {}
    for length, depth, needle, control in all_examples(task):
        text = task.tokenizer.decode(needle.prompt)
        question = text.rsplit("\n", 1)[1]
        before, after = text.split(f"{question} {WORDS[needle.word]}.\n")
        assert before == "" or before.endswith(ENDINGS)
        assert after.endswith(f"\n{question}")
        assert task.tokenizer.decode(control.prompt).count("secret") == 1
        start, end, last = (
            tokens_of(task, needle.prompt, part)
            for part in (before, text.removesuffix(after), text.removesuffix(f"\n{question}"))
        )
        places.setdefault((length, depth), []).append((start - 1) / (start - 1 + last - end))
    for (_, depth), found in places.items():
        assert max(found) <= depth + 0.01  # the cut itself is rounded to a token
        assert np.mean(found) >= depth - 0.3
    assert all(place == 0 for (_, depth), found in places.items() for place in found if depth == 0)


def test_examples_repeat_and_depend_on_the_seed(make_task):
    first, again, other = (list(all_examples(make_task(seed=seed))) for seed in (3, 3, 4))
    assert first == again
    assert all(one[2].prompt != two[2].prompt for one, two in zip(first, other, strict=True))


def test_a_cell_does_not_depend_on_the_others(make_task):
    alone = make_task(lengths=[201], depths=[0.5])
    assert list(alone.examples(201, 0.5)) == list(make_task().examples(201, 0.5))


def test_copying_scores_all_and_nothing_without_the_needle(make_task):
    task = make_task(samples=20)
    cells, rows = run_grid(task, copier(task))
    assert [(cell["length"], cell["depth"]) for cell in cells] == [(n, d) for n in LENGTHS for d in task.config.depths]
    for cell in cells:
        assert cell["choice_accuracy"] == cell["exact_accuracy"] == 1
    assert len(rows) == len(cells) * 20 * 2
    control = [row for row in rows if not row["needle"]]
    assert np.mean([row["choice"] for row in control]) == pytest.approx(CHANCE, abs=4 * (0.09 / 200) ** 0.5)


def test_guessing_scores_chance(make_task):
    task = make_task(samples=40)
    cells, _ = run_grid(task, guesser(0))
    error = (CHANCE * (1 - CHANCE) / (len(cells) * 40)) ** 0.5
    for key in ("choice_accuracy", "control_choice_accuracy", "exact_accuracy"):
        assert np.mean([cell[key] for cell in cells]) == pytest.approx(CHANCE, abs=4 * error)


@pytest.mark.parametrize("pattern", ["T", "A", "TA"])
@torch.inference_mode()
def test_the_model_scorer_equals_reading_everything_anew(make_task, make_model, pattern):
    task = make_task(lengths=[150], depths=[0.5], samples=3)
    vocab_size = task.tokenizer.vocab_size
    model = make_model(pattern, vocab_size=vocab_size + 6, max_positions=256).double()
    prompts = [needle.prompt for _, _, needle, _ in all_examples(task)]
    log_probs, generated = model_scorer(model, vocab_size)(prompts, task.candidates)
    assert len({len(ids) for ids in task.candidates}) > 1
    for i, prompt in enumerate(prompts):
        for j, ids in enumerate(task.candidates):
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1)[range(len(ids)), ids].sum().item()
            assert log_probs[i, j] == pytest.approx(expected, rel=1e-9)
        text = list(prompt)
        for _ in range(max(map(len, task.candidates))):
            text.append(int(model(torch.tensor([text])).logits[0, -1, :vocab_size].argmax()))
        assert generated[i] == text[len(prompt) :]


def test_lengths_are_by_default_what_fits(make_task):
    assert make_task(max_positions=256, lengths=[]).lengths == [64, 128, 256]
    assert make_task(max_positions=128, lengths=[]).lengths == [64, 128]  # 32 cannot hold needle and question


def test_a_model_without_a_limit_takes_longer_cells(make_task):
    assert make_task(max_positions=128, limited=False, lengths=[300]).lengths == [300]
    assert make_task(max_positions=128, limited=False, lengths=[]).lengths == [64, 128]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([150, 300], r"300 passes the model's positions \(256\)"), ([10], r"10 tokens are too few")],
)
def test_lengths_that_cannot_be_are_refused(make_task, lengths, message):
    with pytest.raises(ConfigError, match=message):
        make_task(lengths=lengths)


def test_too_little_text_is_refused(tokenizer):
    config = validate(NeedleConfig, {"lengths": LENGTHS}, "test")
    with pytest.raises(DataError, match="held-out text has"):
        NeedleTask(config, tokenizer, iter([np.arange(2, 100)]), 256, None)
