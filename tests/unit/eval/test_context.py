"""Use of context: exact lengths, controls, repeatable examples, and scores of readers, guessers and trained models."""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from evaluations import CONTEXT

from tost_lm.config import validate
from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.errors import ConfigError
from tost_lm.inference.generation import ForeignFacts
from tost_lm.tasks.answers import Scorer, Scores, score_cell
from tost_lm.tasks.context import CUE_TOKENS, KINDS, NAMES, SHOTS_INTRO, ContextConfig, ManyShot
from tost_lm.tasks.haystacks import NOISE, Text
from tost_lm.tasks.queries import Queries, Query
from tost_lm.tasks.registry import make_queries

DOCUMENTS = [
    "".join(f"Book {book}, page {page}. The lines of page {page} are short.\nNo.\n" for page in range(60))
    for book in range(4)
]
TARGETS = 6
FACTS = ForeignFacts(1500, None, "T")
COPYING, CONTEXT_GAIN, MANY_SHOT_SEEN, MANY_SHOT_UNSEEN = CONTEXT


@pytest.fixture(scope="module", params=["small vocabulary", "words"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Two tokenizers; with the first, most words have several tokens."""
    words = ["".join(f"{word} {name}\n" for name in NAMES for words in KINDS for word in words)] * 5
    texts, size = ([*DOCUMENTS, NOISE], 330) if request.param == "small vocabulary" else ([*DOCUMENTS, *words], 600)
    return SentencePieceTokenizer(train_sentencepiece(texts, size))


def settings(**changes: Any) -> ContextConfig:
    return validate(ContextConfig, {"target_tokens": TARGETS, **changes}, "test")


def text_of(tokenizer: Tokenizer) -> Text:
    return Text("the text", map(tokenizer.encode_array, DOCUMENTS), {})


def make(name: str, tokenizer: Tokenizer, **changes: Any) -> Queries:
    return make_queries(name, tokenizer, lambda: text_of(tokenizer), target_tokens=TARGETS, **changes)


def length_of(task: Queries, count: int = 9) -> int:
    """A length of a task's cell."""
    return task.lengths(settings(shots=[count]), FACTS)[0] if isinstance(task, ManyShot) else 200


@pytest.mark.parametrize("name", CONTEXT)
def test_lengths_are_exact_and_examples_repeat(tokenizer: Tokenizer, name: str):
    task, again, other = make(name, tokenizer), make(name, tokenizer), make(name, tokenizer, seed=1)
    length = length_of(task)
    again.query(length, None, 5)
    for sample in range(4):
        first, control, *_ = conditions = task.query(length, None, sample)
        assert len(conditions) == len(task.conditions)
        assert len(first.prompt) + task.room == len(control.prompt) + task.room == length
        assert all(len(own) <= task.room for own in first.options)
        for one, same in zip(conditions, again.query(length, None, sample), strict=True):
            assert one.prompt.dtype == np.int64
            assert one.prompt[0] == tokenizer.eot
            assert (one.options, one.right, one.references) == (first.options, first.right, first.references)
            assert np.array_equal(one.prompt, same.prompt)
        assert not np.array_equal(first.prompt, control.prompt)
        assert not np.array_equal(first.prompt, other.query(length, None, sample)[0].prompt)


def test_the_passage_is_repeated_at_the_distance(tokenizer: Tokenizer):
    task = make(COPYING, tokenizer)
    distance, passages = task.facts(200)["distance"], set()
    for sample in range(5):
        repeated, control, first = task.query(200, None, sample)
        target = list(repeated.options[0])
        whole, other = (np.concatenate([one.prompt, target]) for one in (repeated, control))
        assert np.array_equal(whole[-TARGETS - CUE_TOKENS :], whole[-TARGETS - CUE_TOKENS - distance : -distance])
        assert np.array_equal(whole[1 + CUE_TOKENS + TARGETS :], other[1 + CUE_TOKENS + TARGETS :])
        assert not np.array_equal(other[1 : 1 + CUE_TOKENS + TARGETS], whole[-TARGETS - CUE_TOKENS :])
        assert first.prompt.tolist() == [tokenizer.eot, *whole[1 : 1 + CUE_TOKENS]]
        passages.add(tuple(target))
    assert len(passages) > 3


def test_the_same_tokens_follow_the_whole_the_cut_and_another_context(tokenizer: Tokenizer):
    task = make(CONTEXT_GAIN, tokenizer)
    removed = task.facts(200)["removed"]
    for sample in range(5):
        whole, control, cut = (one.prompt for one in task.query(200, None, sample))
        target = task.query(200, None, sample)[0].options[0]
        text = tokenizer.decode([*whole.tolist(), *target])
        (own,) = (book for book in DOCUMENTS if text in f"{book}\n\n")
        assert len(cut) == len(whole) - removed
        assert cut.tolist() == [tokenizer.eot, *whole[1 + removed :]]
        assert np.array_equal(control[1 + removed :], whole[1 + removed :])
        foreign = tokenizer.decode(control[1 : 1 + removed].tolist())
        assert foreign not in own
        assert any(foreign in f"{book}\n\n" for book in DOCUMENTS)


@pytest.mark.parametrize("name", [MANY_SHOT_SEEN, MANY_SHOT_UNSEEN])
def test_labels_are_permuted_and_independent_of_the_words_in_the_control(tokenizer: Tokenizer, name: str):
    assert len(set(chain.from_iterable(KINDS))) == sum(map(len, KINDS))
    task, mappings = make(name, tokenizer), set()
    for count in (8, 40):
        for sample in range(5):
            example, control = task.query(length_of(task, count), None, sample)
            shots, asked = read_shots(tokenizer, example)
            assert len(shots) == count
            assert (asked in [word for word, _ in shots]) == (name == MANY_SHOT_SEEN)
            mapping = {kind_of(word): label for word, label in shots}
            assert all(mapping[kind_of(word)] == label for word, label in shots)
            assert sorted(mapping.values()) == list(NAMES)
            assert tokenizer.decode(example.options[example.right]).strip() == mapping[kind_of(asked)]
            mappings.add(tuple(sorted(mapping.items())))
            others, same = read_shots(tokenizer, control)
            assert (same, [word for word, _ in others]) == (asked, [word for word, _ in shots])
            assert len({(kind_of(word), label) for word, label in others}) > 8 or count == 8
    assert len(mappings) > 8


def read_shots(tokenizer: Tokenizer, example: Query) -> tuple[list[tuple[str, str]], str]:
    """The words and labels of a text, and the word of its question."""
    text = tokenizer.decode(example.prompt.tolist()).split(SHOTS_INTRO)[1]
    return re.findall(r"(\w+) ([A-H])\n", text), text.rsplit("\n", 1)[1]


def kind_of(word: str) -> int:
    return next(i for i, words in enumerate(KINDS) if word in words)


def reader(tokenizer: Tokenizer) -> Scorer:
    """A scorer that reads labels."""

    def answer(example: Query) -> str:
        shots, asked = read_shots(tokenizer, example)
        labels = [label for word, label in shots if kind_of(word) == kind_of(asked)]
        return max(set(labels), key=labels.count)

    def score(examples: Sequence[Query], room: int) -> Scores:
        answers = [answer(example) for example in examples]
        options = [[tokenizer.decode(ids).strip() for ids in example.options] for example in examples]
        nats = np.array([[float(option != one) for option in row] for one, row in zip(answers, options, strict=True)])
        return Scores(nats, 1 - nats, [tokenizer.encode(f" {one}") for one in answers])

    return score


@pytest.mark.quick
@pytest.mark.parametrize("name", [MANY_SHOT_SEEN, MANY_SHOT_UNSEEN])
def test_readers_are_right_and_their_controls_are_at_chance(tokenizer: Tokenizer, name: str):
    task, samples = make(name, tokenizer), 150
    scores, rows = score_cell(task, reader(tokenizer), length_of(task), None, samples)
    assert scores["choice_accuracy"] == scores["exact_accuracy"] == 1
    assert scores["choice_accuracy_standard_error"] == scores["answer_nats"] == 0
    chance_error = (task.chance * (1 - task.chance) / samples) ** 0.5
    assert scores["control_choice_accuracy"] == pytest.approx(task.chance, abs=4 * chance_error)
    assert scores["gain_over_control"] > 0
    assert task.facts(length_of(task)) == {"shots": 9}
    assert task.identity(settings(shots=[9]))["lengths"] == [9]
    assert [row["condition"] for row in rows[::samples]] == list(task.conditions)


def test_standard_errors_of_means_and_of_paired_gains(tokenizer: Tokenizer):
    task = make(COPYING, tokenizer)

    def uneven(examples: Sequence[Query], room: int) -> Scores:
        nats = np.array([[float(example.prompt[-1] + 3 * (len(example.prompt) < 100))] for example in examples])
        return Scores(nats, np.ones_like(nats), [[]] * len(examples))

    scores, rows = score_cell(task, uneven, length_of(task), None, 10)
    nats = {condition: [row["nats"] for row in rows if row["condition"] == condition] for condition in task.conditions}
    assert scores["answer_nats"] == pytest.approx(np.mean(nats["repeated"]))
    error = np.std(nats["repeated"], ddof=1) / 10**0.5
    assert scores["answer_nats_standard_error"] == pytest.approx(error)
    assert scores["nats_per_token"] == pytest.approx(scores["answer_nats"] / TARGETS)
    assert (scores["gain_over_control"], scores["gain_over_control_standard_error"]) == (0, 0)
    assert scores["gain_over_first"] == pytest.approx(3 / TARGETS)
    assert scores["gain_over_first_standard_error"] == pytest.approx(0, abs=1e-12)
    assert score_cell(task, uneven, length_of(task), None, 1)[0]["answer_nats_standard_error"] is None


def test_shots_are_at_least_the_labels():
    with pytest.raises(ConfigError, match="shots: input should be greater than or equal to 8, got 4"):
        settings(shots=[4, 8])
