"""Retrieval examples: exact length, repeatable, independent of each other, and with the answers in the text."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from evaluations import RETRIEVAL, RULER, secrets
from shared_data import gpt2_tokenizer, skip_without_shared

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.inference.generation import ForeignFacts
from tost_lm.tasks.grid import find_text
from tost_lm.tasks.haystacks import PAIRS, SENTENCE_ENDS, Text, listed, word_keys
from tost_lm.tasks.needle import NAME as NEEDLE
from tost_lm.tasks.needle import NeedleConfig
from tost_lm.tasks.queries import Queries, Query
from tost_lm.tasks.registry import find_tasks
from tost_lm.tasks.task import Inputs

SAMPLES = 3
NUMBER, UUID = r"\d{7}", r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


@pytest.fixture(params=["SentencePiece", "GPT-2"])
def either(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Tokenizer:
    if request.param == "SentencePiece":
        return tokenizer
    skip_without_shared()
    return gpt2_tokenizer()


def shortest(task: Queries) -> int:
    """The minimum length for the first examples."""
    return task.needed(20) + 1


def examples(task: Queries, length: int, samples: int = SAMPLES) -> Iterator[tuple[Query, Query]]:
    for depth in task.depths:
        for sample in range(samples):
            yield task.query(length, depth, sample)


def text_of(task: Queries, example: Query, tokenizer: Tokenizer) -> str:
    assert example.prompt[0] == tokenizer.eot
    return tokenizer.decode(example.prompt.tolist())


@pytest.mark.parametrize("name", RETRIEVAL)
def test_prompt_and_room_are_exactly_the_length(make_task, either, name):
    task = make_task(name, tokenizer=either)
    for length in (shortest(task), 1500):
        for pair in examples(task, length):
            for example in pair:
                assert len(example.prompt) + task.room == length
                assert max(map(len, example.options)) <= task.room
                assert example.prompt.dtype == np.int64


@pytest.mark.quick
@pytest.mark.parametrize("name", RETRIEVAL)
def test_the_answer_is_in_the_text_and_not_in_the_control(make_task, either, name):
    task = make_task(name, tokenizer=either)
    for example, control in examples(task, max(1500, shortest(task))):
        text, without = text_of(task, example, either), text_of(task, control, either)
        assert text.endswith(f"\n{example.question}")
        assert without.endswith(f"\n{example.question}")
        hidden, left = text.removesuffix(example.question), without.removesuffix(example.question)
        for reference in example.references:
            assert re.search(rf"\b{reference}\b", hidden)
            assert reference not in left
        answer = either.decode(example.options[example.right])
        assert answer == "".join(listed(example.references))


@pytest.mark.parametrize("name", [name for name in RULER if name.startswith("niah_")])
def test_numbers_of_distinct_keys_and_values(make_task, tokenizer, name):
    task = make_task(name)
    form = task.form
    for example, control in examples(task, 1500):
        pairs, left = (secrets(text_of(task, one, tokenizer)) for one in (example, control))
        asked = dict.fromkeys(key for key, value in pairs if value in example.references)
        assert len(asked) == form.asked
        assert [key for key, _ in left if key in asked] == []
        assert len(example.references) == form.asked * form.values
        values = [value for _, value in pairs]
        assert len(set(values)) == len(values)
        if form.haystack == "needles":
            assert len(set(values)) == len({key for key, _ in pairs}) > form.keys
        else:
            assert len(values) == form.keys * form.values
            assert len({key for key, _ in pairs}) == form.keys
        is_uuid = form.value.name == "ID"
        assert all(re.fullmatch(UUID if is_uuid else NUMBER, value) for value in values)
        assert all(key in example.question for key in asked)


def test_the_needle_is_at_the_end_of_a_line_or_sentence_before_its_depth(make_task, tokenizer):
    task = make_task(depths=(0.0, 0.25, 0.5, 1.0), keys=1)
    for depth in task.depths:
        assert depth is not None
        found = []
        for sample in range(6):
            example, _ = task.query(300, depth, sample)
            text = text_of(task, example, tokenizer)
            before, after = text.split(f" {example.question} {example.references[0]}.\n")
            assert before == "" or before.endswith(("\n", *SENTENCE_ENDS))
            start, end, last = (
                tokens_of(example, tokenizer, part)
                for part in (before, text.removesuffix(after), text.removesuffix(f"\n{example.question}"))
            )
            found.append((start - 1) / (start - 1 + last - end))
        assert max(found) <= depth + 0.01  # the cut itself is rounded to a token
        assert np.mean(found) >= depth - 0.06


def tokens_of(example: Query, tokenizer: Tokenizer, beginning: str) -> int:
    """Number of tokens of the prompt's beginning, with EOT."""
    ids = example.prompt.tolist()
    return next(n for n in range(1, len(ids) + 1) if tokenizer.decode(ids[:n]) == beginning)


def test_several_needles_are_distributed_over_the_text(make_task, tokenizer):
    task = make_task("niah_multiquery@own-words")
    places = []
    for example, _ in examples(task, 1500, samples=20):
        text = text_of(task, example, tokenizer)
        places += [found.start() / len(text) for found in re.finditer("The secret number of", text)][:4]
    assert np.histogram(places, bins=4, range=(0, 1))[0].min() >= 8


@pytest.mark.parametrize("name", RETRIEVAL)
def test_examples_repeat_and_depend_on_the_seed(make_task, name):
    first, again, other = (list(examples(make_task(name, seed=seed), 1500)) for seed in (3, 3, 4))
    for one, same, unlike in zip(first, again, other, strict=True):
        for left, right in zip(one, same, strict=True):
            assert np.array_equal(left.prompt, right.prompt)
            assert (left.references, left.options, left.question) == (right.references, right.options, right.question)
        assert not np.array_equal(one[0].prompt, unlike[0].prompt)


@pytest.mark.parametrize("name", RETRIEVAL)
def test_an_example_does_not_depend_on_others(make_task, name):
    task, alone = make_task(name, depths=(0.25, 0.5)), make_task(name, depths=(0.5,))
    *_, (last, _) = [pair for length in (1500, 1200) for pair in examples(task, length)]
    expected, _ = alone.query(1200, alone.depths[0], SAMPLES - 1)
    assert np.array_equal(last.prompt, expected.prompt)


def test_the_text_of_a_length_does_not_depend_on_earlier_reads():
    def text() -> Text:
        return Text("the text", (np.arange(n, n + 7) for n in range(0, 7000, 7)), {})

    read_before = text()
    assert len(read_before.for_length(50)) == 3206  # 458 arrays are the first with 64 · 50 ids
    assert np.array_equal(read_before.for_length(10), text().for_length(10))
    assert len(text().for_length(7000)) == 7000
    with pytest.raises(DataError, match=r"the text has 7,000 tokens, too few for lengths of 7,001; give a lon"):
        text().for_length(7001)


def test_word_keys_never_repeat():
    keys = list(islice(word_keys(np.random.default_rng(0)), PAIRS))
    assert len(set(keys)) == PAIRS
    assert {key.count("-") for key in keys} == {1, 2}


def test_default_lengths_are_those_that_fit(make_task):
    task = make_task(keys=1)
    assert task.lengths(NeedleConfig(samples=3), ForeignFacts(256, 256, "T")) == [64, 128, 256]
    assert task.lengths(NeedleConfig(samples=3), ForeignFacts(128, None, "T")) == [64, 128]  # 32 is too short
    assert task.lengths(NeedleConfig(samples=3, lengths=[300]), ForeignFacts(128, None, "T")) == [300]


@pytest.mark.parametrize("name", RETRIEVAL)
def test_impossible_lengths_are_rejected(make_task, name):
    task = make_task(name)
    limit = max(1500, shortest(task))
    with pytest.raises(ConfigError, match=rf"needle\.lengths: {limit + 1} exceeds the model's positions \({limit}\)"):
        task.lengths(NeedleConfig(samples=3, lengths=[limit, limit + 1]), ForeignFacts(limit, limit, "T"))
    with pytest.raises(ConfigError, match=rf"{re.escape(name)}, .* take {task.needed(3)}; raise it$"):
        task.lengths(NeedleConfig(samples=3, lengths=[task.needed(3)]), ForeignFacts(1500, None, "T"))
    if task.text:
        with pytest.raises(DataError, match="the text has"):
            task.lengths(NeedleConfig(samples=3, lengths=[100_000]), ForeignFacts(1500, None, "T"))


def test_groups_of_tasks_have_a_name():
    def tasks(*names: str) -> list[str]:
        return [task.name for _, task in find_tasks(names)]

    assert tasks("needle") == [NEEDLE]
    assert tasks(RULER[1], "ruler", "needle", NEEDLE) == [RULER[1], RULER[0], *RULER[2:], NEEDLE]


def test_the_text_is_a_file_the_held_out_documents_or_pythons_documentation(tokenizer, shards, tmp_path):
    def text(haystack: Path | None, has_shards: bool = True) -> Text:
        inputs = Inputs(None, tokenizer, lambda: shards, has_shards, "the model")
        return find_text(NeedleConfig(haystack=haystack), inputs)

    file = tmp_path / "book.txt"
    file.write_text("A line of the book.\n" * 100)
    of_file = text(file)
    assert tokenizer.decode(of_file.for_length(100).tolist()).startswith("A line of the book.\nA line")
    assert of_file.facts["text"] == str(file)

    held_out = text(None)
    first = tokenizer.decode(next(shards.documents("valid")).tolist())
    assert tokenizer.decode(held_out.for_length(100).tolist()).startswith(f"{first}\n\nPage ")
    assert held_out.shards is shards

    embedded, again = (text(None, False) for _ in range(2))
    assert np.array_equal(embedded.for_length(100), again.for_length(100))
    assert embedded.facts == again.facts

    with pytest.raises(DataError, match=r"haystack .*nowhere: no such file"):
        text(tmp_path / "nowhere")
