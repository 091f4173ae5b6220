"""Overlaps of test sets and training shards are those of a plain search for 13-grams."""

import json
import random

import numpy as np
import pytest
from builds import prep_config
from hf_tokenizers import byte_level, made

from experiments.contamination import search
from experiments.contamination.search import SetNgrams, SetTotals, measure_contamination
from tost_lm.data.shards import Shards
from tost_lm.data_prep.build import build_shards

WORDS = ["the", "The", "lines", "of", "this,", "page.", "are", "short", "naïve", "42", "(they)", "say_little", "漢字"]


def plain_ngrams(text: str) -> set[tuple[str, ...]]:
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    return {tuple(words[start : start + 13]) for start in range(len(words) - 12)}


def drawn(draws: random.Random, words: int) -> str:
    return " ".join(draws.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Several shards with documents of 1 to 200 words, some of which are there twice."""
    folder, draws = tmp_path_factory.mktemp("shards"), random.Random(0)
    texts = [drawn(draws, draws.randrange(1, 200)) for _ in range(120)]
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": f"{text}."}) + "\n" for text in texts + texts[:40])
    )
    config = prep_config(folder / "corpus.jsonl", folder / "shards", shard_tokens=5000)
    build_shards(config, made(byte_level()))
    return Shards.open(folder / "shards")


def documents(shards: Shards) -> list[str]:
    return [shards.tokenizer().decode(ids.tolist()) for ids in shards.documents("train")]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_overlaps_are_those_of_a_plain_search(shards: Shards, workers: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "TASK_TOKENS", 3000)
    assert len(shards.entries("train")) > 2
    draws, training = random.Random(1), documents(shards)
    quoted = [text.split() for text in training if len(text.split()) > 30]
    examples = [drawn(draws, draws.randrange(1, 60)) for _ in range(30)]
    for text in quoted[:20]:  # with other case, punctuation and line ends
        start, words = draws.randrange(len(text) - 16), draws.randrange(11, 17)
        examples.append(f"{drawn(draws, 9)}\n{' - '.join(text[start : start + words]).upper()}! {drawn(draws, 9)}")
    sets = {"ours": examples, "short": ["only a few words"]}
    read: list[int] = []
    result = measure_contamination(shards, sets, workers, read.append)
    assert len(read) > 4
    assert read[-1] == shards.manifest["splits"]["train"]["tokens"]

    places: dict[tuple[str, ...], list[int]] = {}
    for number, text in enumerate(training):
        for ngram in plain_ngrams(text):
            places.setdefault(ngram, []).append(number)
    expected = {}
    for number, text in enumerate(examples, start=1):
        ngrams = plain_ngrams(text)
        if found := ngrams & places.keys():
            expected[number] = (len(ngrams), len(found), max(len(places[ngram]) for ngram in found))
    assert 10 < len(expected) < 45
    assert {o.example: (o.ngrams, o.found, o.documents) for o in result.overlaps} == expected
    for overlap in result.overlaps:
        held = places[tuple(overlap.text.split())]
        assert (overlap.set, overlap.documents, overlap.document) == ("ours", len(held), held[0])
    fractions = [overlap.found / overlap.ngrams for overlap in result.overlaps]
    assert fractions == sorted(fractions, reverse=True)
    checked = sum(bool(plain_ngrams(text)) for text in examples)
    assert result.totals == {"ours": SetTotals(len(examples), checked, len(expected)), "short": SetTotals(1, 0, 0)}


@pytest.mark.quick
def test_equal_hashes_are_no_match():
    ngrams = SetNgrams({"a": [" ".join(f"w{n}" for n in range(13))]})
    assert ngrams.find(" ".join(f"W{n}" for n in range(13))).tolist() == [0]
    ngrams._factor = np.uint64(1)  # now the hash is the sum of the words' ids
    ngrams._sorted_G = ngrams._hashes(ngrams.ngrams_GN.T)
    assert ngrams.find(" ".join(f"w{n}" for n in reversed(range(13)))).tolist() == []
    assert ngrams.find(" ".join(f"w{n}" for n in range(13))).tolist() == [0]


def test_sets_without_ngrams_find_nothing():
    ngrams = SetNgrams({"short": ["too short", ""]})
    assert ngrams.examples == [("short", 1), ("short", 2)]
    assert ngrams.find("many words " * 20).tolist() == []
