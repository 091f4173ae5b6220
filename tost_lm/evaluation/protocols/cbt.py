"""The Children's Book Test: which of ten words is missing in the 21st sentence of a passage (arXiv 1511.02301)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.likelihood import Likelihoods
from tost_lm.evaluation.protocols.interface import Example, Protocol, Row, read_text, to_array
from tost_lm.evaluation.scoring import bootstrap_error
from tost_lm.evaluation.windows import after_what_fits

SENTENCES, CANDIDATES, BLANK = 20, 10, "XXXXX"


class MissingWord(Protocol):
    """`cbt_cn@gpt2` and `cbt_ne@gpt2`: the candidate that is, with the rest of its sentence, the likeliest."""

    headline = "accuracy"

    def __init__(self, data_set: str):
        self.name, self.data_set = f"{data_set}@gpt2", data_set

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        return [self._example(question, tokenizer, window) for question in questions(path)]

    def _example(self, question: "Question", tokenizer: Tokenizer, window: int) -> Example:
        context = tokenizer.encode(detokenized(question.before))
        requests = []
        for candidate in question.candidates:
            text = detokenized(f"{question.before} {candidate} {question.after}".strip())
            ids = np.array(tokenizer.encode(text), dtype=np.int64)
            requests.append(after_what_fits(ids, _common(context, ids.tolist()), window))
        return Example(tuple(requests), {"candidates": list(question.candidates), "answer": question.answer})

    def row(self, example: Example, scores: Likelihoods) -> Row:
        chosen = example.facts["candidates"][int(scores.nats.argmin())]
        right = chosen == example.facts["answer"]
        return {**example.facts, "chosen": chosen, "right": right, "nats": scores.nats.tolist()}

    def totals(self, rows: Sequence[Row]) -> Row:
        right = to_array(rows, "right")
        return {
            "examples": len(rows),
            "accuracy": float(right.mean()),
            "accuracy_standard_error": bootstrap_error(right, np.ones(len(rows))),
            "chance": 1 / CANDIDATES,
        }


class Question(NamedTuple):
    before: str
    """The passage and what stands before the blank."""
    after: str
    candidates: tuple[str, ...]
    answer: str


def questions(path: Path) -> list[Question]:
    """The questions of a file in the original format: sentences `1 …` to `20 …`, then `21 …<TAB>answer<TAB><TAB>a|b|…`.

    Raises:
        DataError: a line is not what it must be.
    """
    found, sentences = [], []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        index, _, rest = line.partition(" ")
        if index != str(len(sentences) + 1):
            raise DataError(f"{path}, line {number}: begins with {index!r}, and sentence {len(sentences) + 1} was due")
        if len(sentences) < SENTENCES:
            sentences.append(rest.strip())
            continue
        found.append(_question(f"{path}, line {number}", sentences, rest))
        sentences = []
    if sentences:
        raise DataError(f"{path}: ends after sentence {len(sentences)} of {SENTENCES + 1}")
    if not found:
        raise DataError(f"{path}: empty; give a file such as cbtest_CN_valid_2000ex.txt")
    return found


def _question(place: str, sentences: Sequence[str], line: str) -> Question:
    parts = line.split("\t")
    if len(parts) != 4 or parts[0].split().count(BLANK) != 1:
        raise DataError(f"{place}: must be a sentence with one {BLANK}, TAB, the answer, two TABs and candidates a|b|…")
    words, answer, candidates = parts[0].split(), parts[1].strip(), tuple(parts[3].strip().split("|"))
    if len(candidates) != CANDIDATES or answer not in candidates:
        raise DataError(f"{place}: {len(candidates)} candidates, of {CANDIDATES}, one of which must be {answer!r}")
    blank = words.index(BLANK)
    before = " ".join([*sentences, *words[:blank]])
    return Question(before, " ".join(words[blank + 1 :]), candidates, answer)


def detokenized(text: str) -> str:
    """Text as it is printed: the Penn Treebank tokenizer's brackets, quotes and spaces taken out again."""
    for token, mark in (("-LRB- ", "("), (" -RRB-", ")"), ("`` ", '"'), (" ''", '"'), ("` ", "'"), (" n't", "n't")):
        text = text.replace(token, mark)
    for mark in (".", ",", "!", "?", ";", ":", "'"):
        text = text.replace(f" {mark}", mark)
    return text


def _common(context: Sequence[int], ids: Sequence[int]) -> int:
    """Tokens that both begin with, at least one and fewer than all of `ids`."""
    same = 0
    while same < min(len(context), len(ids) - 1) and context[same] == ids[same]:
        same += 1
    return max(1, same)
