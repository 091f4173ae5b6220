"""The Children's Book Test: which of ten words is missing in the 21st sentence of a passage (arXiv 1511.02301)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.likelihood import Likelihoods, Request
from tost_lm.evaluation.protocols.interface import Example, Protocol, Row, read_text, wrong_format
from tost_lm.evaluation.protocols.lambada import accuracy_of
from tost_lm.evaluation.windows import left_truncated

SENTENCES, CANDIDATES, BLANK = 20, 10, "XXXXX"


class Question(NamedTuple):
    before: str
    """The passage and the words before the blank."""
    after: str
    candidates: tuple[str, ...]
    answer: str

    def filled(self, candidate: str) -> str:
        """The whole passage with a candidate in the blank."""
        return f"{self.before} {candidate} {self.after}".strip()


class MissingWord(Protocol):
    """`cbt_cn@gpt2` and `cbt_ne@gpt2`: the candidate that is the likeliest together with the rest of its sentence."""

    headline = "accuracy"

    def __init__(self, data_set: str):
        self.name, self.data_set = f"{data_set}@gpt2", data_set

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        return [
            Example(
                tuple(self.requests(question, tokenizer, window)),
                {"candidates": list(question.candidates), "answer": question.answer},
            )
            for question in questions(path)
        ]

    def requests(self, question: Question, tokenizer: Tokenizer, window: int) -> list[Request]:
        """A request for each candidate."""
        context, requests = tokenizer.encode(detokenized(question.before)), []
        for candidate in question.candidates:
            ids = np.array(tokenizer.encode(detokenized(question.filled(candidate))), dtype=np.int64)
            requests.append(left_truncated(ids, _common_tokens(context, ids.tolist()), window))
        return requests

    def row(self, example: Example, scores: Likelihoods) -> Row:
        chosen = example.facts["candidates"][int(scores.nats.argmin())]
        right = chosen == example.facts["answer"]
        return {**example.facts, "chosen": chosen, "right": right, "nats": scores.nats.tolist()}

    def totals(self, rows: Sequence[Row]) -> Row:
        return {**accuracy_of(rows), "chance": 1 / CANDIDATES}


def questions(path: Path) -> list[Question]:
    """The questions of a file in the original format: sentences `1 …` to `20 …`, then `21 …<TAB>answer<TAB><TAB>a|b|…`.

    Raises:
        DataError: a line has another format.
    """
    found, sentences, text = [], [], read_text(path)
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        index, _, rest = line.partition(" ")
        if index != str(len(sentences) + 1):
            expected = f"cbtest_CN_valid_2000ex.txt or the like, with sentence {len(sentences) + 1} in this line"
            raise wrong_format(path, text, expected, number)
        if len(sentences) < SENTENCES:
            sentences.append(rest.strip())
            continue
        found.append(_question(f"{path}, line {number}", sentences, rest))
        sentences = []
    if sentences:
        raise DataError(f"{path}: ends after sentence {len(sentences)} of {SENTENCES + 1}; give the whole file")
    if not found:
        raise wrong_format(path, text, "cbtest_CN_valid_2000ex.txt or the like")
    return found


def _question(place: str, sentences: Sequence[str], line: str) -> Question:
    columns = line.split("\t")
    if len(columns) != 4 or columns[0].split().count(BLANK) != 1:
        raise DataError(
            f"{place}: wrong format; give a sentence with one {BLANK}, TAB, the answer, two TABs, and candidates a|b|…"
        )
    words, answer, candidates = columns[0].split(), columns[1].strip(), tuple(columns[3].strip().split("|"))
    if len(candidates) != CANDIDATES or answer not in candidates:
        raise DataError(
            f"{place}: {len(candidates)} candidates; give {CANDIDATES}, and the answer {answer!r} as one of them"
        )
    blank = words.index(BLANK)
    before = " ".join([*sentences, *words[:blank]])
    return Question(before, " ".join(words[blank + 1 :]), candidates, answer)


def detokenized(text: str) -> str:
    """The text without the spaces, brackets and quotes of the Penn Treebank tokenizer."""
    for token, mark in (("-LRB- ", "("), (" -RRB-", ")"), ("`` ", '"'), (" ''", '"'), ("` ", "'"), (" n't", "n't")):
        text = text.replace(token, mark)
    for mark in (".", ",", "!", "?", ";", ":", "'"):
        text = text.replace(f" {mark}", mark)
    return text


def _common_tokens(context: Sequence[int], ids: Sequence[int]) -> int:
    """Length of the common prefix, at least one and less than that of `ids`."""
    same = 0
    while same < min(len(context), len(ids) - 1) and context[same] == ids[same]:
        same += 1
    return max(1, same)
