"""Recall passages: every secret is stated several times with one word, between the lines of the text in their order."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tost_lm.data.passages import BEGINNING, LINE_CHARACTERS, LINES, MENTIONS, SECRETS, TEST_NAMES, TEST_WORDS, passages
from tost_lm.data.settings import PassagesConfig
from tost_lm.errors import DataError

TEXTS = [[f"line {n} of text {t} " + "x" * n for n in range(200)] for t in range(3)]


def drawn(texts: list[list[str]] = TEXTS, **settings: object) -> list[str]:
    return list(passages(texts, PassagesConfig(file=Path("p"), count=40, **settings)))  # pyright: ignore[reportArgumentType]


def secrets(passage: str) -> list[tuple[str, str, str]]:
    """Beginning, key and word of each secret, in the order of the passage; lines of the text have no full stop."""
    found = [line[:-1].rsplit(" ", 2) for line in passage.split("\n") if line.endswith(".")]
    return [(beginning, key, word) for beginning, key, word in found]


def test_secrets_are_stated_several_times_between_lines_of_one_text():
    places, beginnings = [], set[str]()
    of_text = {"line", "text", *("x" * n for n in range(3, 11))}
    for passage in drawn():
        words, mentions, lines = defaultdict(set), defaultdict(int), passage.split("\n")
        ((beginning,),) = [{beginning for beginning, _, _ in secrets(passage)}]
        for _, key, word in secrets(passage):
            words[key].add(word)
            mentions[key] += 1
            assert {key, word, *beginning.split()} <= of_text
        beginnings.add(beginning)
        assert BEGINNING[0] <= len(beginning.split()) <= BEGINNING[1]
        assert SECRETS[0] <= len(words) <= SECRETS[1]
        assert all(len(found) == 1 for found in words.values())
        assert all(MENTIONS[0] <= number <= MENTIONS[1] for number in mentions.values())
        places += [n / len(lines) for n, line in enumerate(lines) if line.endswith(".")]
        text = [line for line in lines if not line.endswith(".")]
        assert LINES[0] <= len(text) <= LINES[1]
        cut = [line[:LINE_CHARACTERS] for line in TEXTS[int(text[0].split()[4])]]
        first = cut.index(text[0])
        assert cut[first : first + len(text)] == text
    assert min(places) < 0.1
    assert max(places) > 0.9
    assert len(beginnings) > 20


def test_nothing_of_the_test_is_in_a_passage():
    texts = [[f"{name} has one {word.upper()} and more" for name in TEST_NAMES for word in TEST_WORDS] + TEXTS[0]]
    words = set(re.findall(r"\w+", " ".join(drawn(texts)).lower()))
    assert words.isdisjoint(word.lower() for word in (*TEST_NAMES, *TEST_WORDS))


def test_a_text_without_words_is_refused():
    with pytest.raises(DataError, match=r"passages\.text embedded: no document has 6 words; give other documents"):
        drawn([["1 + 1 = 2"] * 100])


def test_the_same_settings_give_the_same_passages():
    assert drawn() == drawn()
    assert drawn() != drawn(seed=1)
    assert len(set(drawn())) == 40
