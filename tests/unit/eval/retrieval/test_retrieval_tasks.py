"""Retrieval texts: exact length, repeatable, independent of each other, with the answers of their questions only."""

import re
from pathlib import Path

import numpy as np
import pytest
from evaluations import RETRIEVAL
from shared_data import gpt2_tokenizer, skip_without_shared

from tost_lm.config import validate
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.inference.generation import ForeignFacts
from tost_lm.tasks.association import FORM as ASSOCIATION
from tost_lm.tasks.grid import find_text
from tost_lm.tasks.haystacks import PAIRS, SENTENCE_ENDS, Text, records_haystack
from tost_lm.tasks.needle import NAME as NEEDLE
from tost_lm.tasks.queries import AskedText, HaystackConfig, KeyedQueries
from tost_lm.tasks.registry import find_tasks
from tost_lm.tasks.task import Inputs

SAMPLES = 3


@pytest.fixture(params=["SentencePiece", "GPT-2"])
def either(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Tokenizer:
    if request.param == "SentencePiece":
        return tokenizer
    skip_without_shared()
    return gpt2_tokenizer()


def texts(task: KeyedQueries, length: int, samples: int = SAMPLES) -> list[AskedText]:
    return [task.asked(length, sample) for sample in range(samples)]


@pytest.mark.parametrize("name", RETRIEVAL)
def test_a_text_with_any_question_and_the_room_is_exactly_the_length(make_task, either, name):
    task = make_task(name, tokenizer=either)
    for length in (task.needed + 1, 1500):
        for text in texts(task, length):
            assert {len(text.context) + len(one.ids) + task.room for one in text.asked} == {length}
            assert max(len(option) for one in text.asked for option in one.options) <= task.room
            assert text.context.dtype == text.asked[0].ids.dtype == np.int64


@pytest.mark.quick
@pytest.mark.parametrize("name", RETRIEVAL)
def test_answers_are_in_the_text_and_those_of_controls_are_not(make_task, either, name):
    task = make_task(name, tokenizer=either)
    for text in texts(task, 1500):
        assert text.context[0] == either.eot
        read = either.decode(text.context.tolist())
        keys = {either.decode(one.ids.tolist()).strip() for one in text.asked}
        assert len(keys) == len({one.references for one in text.asked}) == 2 * len(task.settings.depths)
        for number, one in enumerate(text.asked):
            assert re.fullmatch(rf"\n+{re.escape(one.shown)}", either.decode(one.ids.tolist()))
            assert either.decode(one.options[one.right]) == f" {one.references[0]}"
            assert bool(re.search(rf"\b{one.references[0]}\b", read)) == (number < len(text.questions))


@pytest.mark.parametrize("name", RETRIEVAL)
def test_the_needles_are_at_ends_of_lines_or_sentences_before_their_depths(make_task, tokenizer, name):
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    task, found = make_task(name, depths=depths), []
    for text in texts(task, 1500, 8):
        read = tokenizer.decode(text.context.tolist())
        places = {}
        for one in text.questions:
            key = next(key for key in task.form.keys if task.form.question(key) == one.shown)
            needle = "".join(task.form.needle(key, one.references[0]))
            before, _, _ = read.partition(needle)
            assert before != read
            assert before == "" or before.endswith(("\n", *SENTENCE_ENDS))
            places[one.depth] = len(before) / (len(read) - len(needle))
        found.append([places[depth] for depth in depths])
    assert np.abs(np.mean(found, 0) - depths).max() < 0.08


@pytest.mark.parametrize("name", RETRIEVAL)
def test_a_text_repeats_and_depends_on_the_seed_its_number_and_nothing_else(make_task, name):
    task = make_task(name, seed=3)
    texts(task, 1200)
    again, other = make_task(name, seed=3), make_task(name, seed=4)
    for sample in (2, 0):
        left, right = (own.asked(1500, sample) for own in (task, again))
        assert np.array_equal(left.context, right.context)
        assert [one.shown for one in left.asked] == [one.shown for one in right.asked]
        assert not np.array_equal(left.context, other.asked(1500, sample).context)


def test_with_few_depths_more_keys_are_in_the_text(make_task, tokenizer):
    task = make_task(depths=(0.5,))
    (text,) = texts(task, 600, 1)
    assert (task.chance, len(text.questions), len(text.controls)) == (1 / 4, 1, 1)
    assert tokenizer.decode(text.context.tolist()).count("In secret they named") == 4
    with pytest.raises(ConfigError, match=r"depths: .* at most 8 "):
        validate(HaystackConfig, {"depths": [n / 10 for n in range(9)]}, "needle")


def test_a_question_about_landmarks_shares_no_word_with_its_needle():
    words = lambda text: {*re.findall(r"\w+", text.lower())} - {"the", "of"}
    for country in ASSOCIATION.keys:
        needle = "".join(ASSOCIATION.needle(country, "Anna"))
        assert not words(needle) & words(ASSOCIATION.question(country))


def test_records_are_distinct_and_leave_out_what_is_asked():
    found = []
    left_out = {"amber-falcon", "1234567"}

    def record(key: str, value: str) -> list[int]:
        found.append((key, value))
        return [len(found)] * 3

    ids = records_haystack(record, 3 * PAIRS - 1, np.random.default_rng(0), left_out)
    keys, values = map(set, zip(*found, strict=True))
    assert len(keys) == len(values) == len(found) == PAIRS
    assert {key.count("-") for key in keys} == {1, 2}
    assert left_out.isdisjoint(keys | values)
    assert ids.tolist() == [1, 1, *np.repeat(np.arange(2, PAIRS + 1), 3)]


def test_the_text_of_a_length_does_not_depend_on_earlier_reads():
    def text() -> Text:
        return Text("the text", (np.arange(n, n + 7) for n in range(0, 7000, 7)), {})

    read_before = text()
    assert len(read_before.for_length(50)) == 3206  # 458 arrays are the first with 64 · 50 ids
    assert np.array_equal(read_before.for_length(10), text().for_length(10))
    assert len(text().for_length(7000)) == 7000
    with pytest.raises(DataError, match=r"the text has 7,000 tokens, too few for lengths of 7,001; give a lon"):
        text().for_length(7001)


def test_default_lengths_are_those_that_fit(make_task):
    needed = make_task().needed
    context = 2 * needed + 2  # a quarter is too short
    assert make_task().lengths(ForeignFacts(context, context, "T")) == [context // 2, context]
    assert make_task(lengths=[1000, 300]).lengths(ForeignFacts(128, None, "T")) == [300, 1000]


@pytest.mark.parametrize("name", RETRIEVAL)
def test_impossible_lengths_are_rejected(make_task, name):
    needed, section = make_task(name).needed, name.split("@")[0]
    with pytest.raises(ConfigError, match=rf"{section}\.lengths: 1501 exceeds the model's positions \(1500\)"):
        make_task(name, lengths=[1500, 1501]).lengths(ForeignFacts(1500, 1500, "T"))
    with pytest.raises(ConfigError, match=rf"{re.escape(name)}, .* take {needed}; raise it$"):
        make_task(name, lengths=[needed]).lengths(ForeignFacts(1500, None, "T"))
    if make_task(name).text:
        with pytest.raises(DataError, match="the text has"):
            make_task(name, lengths=[100_000]).lengths(ForeignFacts(1500, None, "T"))


def test_groups_of_tasks_have_a_name():
    def tasks(*names: str) -> list[str]:
        return [task.name for _, task in find_tasks(names)]

    assert tasks("needle") == [NEEDLE]
    assert tasks("ptb@megatron", "needle", NEEDLE, "records") == ["ptb@megatron", NEEDLE, "records@numbers"]


def test_the_text_is_a_file_the_held_out_documents_or_pythons_documentation(tokenizer, shards, tmp_path):
    def text(haystack: Path | None, has_shards: bool = True) -> Text:
        inputs = Inputs(None, tokenizer, lambda: shards, has_shards, "the model")
        return find_text(HaystackConfig(haystack=haystack), inputs)

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
