"""Recall passages: every secret is stated several times with one word, between the lines of the text in their order."""

import re
from collections import defaultdict
from pathlib import Path

from tost_lm.data.passages import LINE_CHARACTERS, MENTIONS, NAMES, SECRETS, WORDS, passages
from tost_lm.data.settings import PassagesConfig

SECRET = re.compile(r"The secret word of (\w+) is (\w+)\.")
TEXTS = [[f"line {n} of text {t} " + "x" * n for n in range(200)] for t in range(3)]


def drawn(**settings: object) -> list[str]:
    return list(passages(TEXTS, PassagesConfig(file=Path("p"), count=40, **settings)))  # pyright: ignore[reportArgumentType]


def test_secrets_are_stated_several_times_between_lines_of_one_text():
    places = []
    for passage in drawn(lines=(5, 9)):
        words, mentions = defaultdict(set), defaultdict(int)
        for name, word in SECRET.findall(passage):
            words[name].add(word)
            mentions[name] += 1
        assert SECRETS[0] <= len(words) <= SECRETS[1]
        assert all(len(found) == 1 for found in words.values())
        assert all(MENTIONS[0] <= number <= MENTIONS[1] for number in mentions.values())
        assert words.keys() <= set(NAMES)
        assert set().union(*words.values()) <= set(WORDS)
        lines = passage.split("\n")
        places += [n / len(lines) for n, line in enumerate(lines) if SECRET.fullmatch(line)]
        text = [line for line in lines if not SECRET.fullmatch(line)]
        assert 5 <= len(text) <= 9
        cut = [line[:LINE_CHARACTERS] for line in TEXTS[int(text[0].split()[4])]]
        first = cut.index(text[0])
        assert cut[first : first + len(text)] == text
    assert min(places) < 0.1
    assert max(places) > 0.9


def test_the_same_settings_give_the_same_passages():
    assert drawn() == drawn()
    assert drawn() != drawn(seed=1)
    assert len(set(drawn())) == 40
