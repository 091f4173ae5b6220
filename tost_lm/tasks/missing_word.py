"""Tasks that ask for a missing word: LAMBADA and the Children's Book Test.

LAMBADA: the last word of a passage, which its last sentence alone does not determine (arXiv 1606.06031). The
Children's Book Test: which of ten words is missing in the 21st sentence of a passage (arXiv 1511.02301).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.inference.requests import Likelihoods, bootstrap_error, left_truncated
from tost_lm.tasks.data_sets import DataSet, HubSource
from tost_lm.tasks.perplexity import with_error
from tost_lm.tasks.scored import (
    Example,
    ScoredTask,
    accuracy_of,
    read_json_lines,
    read_text,
    section_of_test_sets,
    to_array,
    wrong_format,
)
from tost_lm.tasks.task import Family, Row


class LastWord(ScoredTask):
    """`…@lm-eval`: the last word with the space before it, given the rest. It is right if each of its tokens is the
    most likely one. Perplexity is per word."""

    about = "accuracy and perplexity of the last word"
    headline, scored = "accuracy", "word"

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        return [self._example(text, tokenizer, window) for text in passages(path)]

    def _example(self, text: str, tokenizer: Tokenizer, window: int) -> Example:
        context, word = text.rsplit(" ", 1)
        begin, ids = len(tokenizer.encode(context)), np.array(tokenizer.encode(text), dtype=np.int64)
        begin = max(1, self.first_scored(begin, len(ids)))
        return Example((left_truncated(ids, begin, window),), {"word": word})

    def first_scored(self, first_of_word: int, tokens: int) -> int:
        """Index of the first token that is scored."""
        return first_of_word

    def row(self, example: Example, scores: Likelihoods) -> Row:
        return {
            **example.facts,
            "tokens": int(scores.tokens[0]),
            "nats": float(scores.nats[0]),
            "right": bool(scores.is_greedy[0]),
        }

    def totals(self, rows: Sequence[Row]) -> Row:
        nats = to_array(rows, "nats")
        error = bootstrap_error(nats, np.ones(len(rows)))
        totals = {
            **accuracy_of(rows),
            f"nats_per_{self.scored}": float(nats.mean()),
            f"nats_per_{self.scored}_standard_error": error,
            **with_error(f"{self.scored}_perplexity", float(nats.mean()), error),
        }
        return totals | ({} if self.by_token else {"words_of_one_token": int((to_array(rows, "tokens") == 1).sum())})


class LastToken(LastWord):
    """`…@last-token`: the last token of the passage, given all tokens before it, also those of its word."""

    about = "accuracy of the last token"
    rules, by_token, scored = "last-token", True, "token"

    def first_scored(self, first_of_word: int, tokens: int) -> int:
        return tokens - 1


def passages(path: Path) -> list[str]:
    """The texts of a file of JSON lines {"text": …}. Raises DataError."""
    texts = []
    for place, row in read_json_lines(path, 'JSON lines {"text": …}'):
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str) or " " not in text.strip():
            raise DataError(f'{place}: no passage of two or more words under "text"; give the published file')
        texts.append(text)
    return texts


SENTENCES, CANDIDATES, BLANK = 20, 10, "XXXXX"


class Cloze(NamedTuple):
    """A passage with a blank."""

    before: str
    """The passage and the words before the blank."""
    after: str
    candidates: tuple[str, ...]
    answer: str

    def filled(self, candidate: str) -> str:
        """The whole passage with a candidate in the blank."""
        return f"{self.before} {candidate} {self.after}".strip()


class MissingWord(ScoredTask):
    """`cbt_cn@gpt2` and `cbt_ne@gpt2`: the candidate that is the likeliest together with the rest of its sentence."""

    about = "accuracy of the missing word among ten"
    rules, headline = "gpt2", "accuracy"

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        found = []
        for cloze in clozes(path):
            context, requests = tokenizer.encode(detokenized(cloze.before)), []
            for candidate in cloze.candidates:
                ids = np.array(tokenizer.encode(detokenized(cloze.filled(candidate))), dtype=np.int64)
                requests.append(left_truncated(ids, _common_tokens(context, ids.tolist()), window))
            found.append(Example(tuple(requests), {"candidates": list(cloze.candidates), "answer": cloze.answer}))
        return found

    def row(self, example: Example, scores: Likelihoods) -> Row:
        chosen = example.facts["candidates"][int(scores.nats.argmin())]
        right = chosen == example.facts["answer"]
        return {**example.facts, "chosen": chosen, "right": right, "nats": scores.nats.tolist()}

    def totals(self, rows: Sequence[Row]) -> Row:
        return {**accuracy_of(rows), "chance": 1 / CANDIDATES}


def clozes(path: Path) -> list[Cloze]:
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
        found.append(_cloze(f"{path}, line {number}", sentences, rest))
        sentences = []
    if sentences:
        raise DataError(f"{path}: ends after sentence {len(sentences)} of {SENTENCES + 1}; give the whole file")
    if not found:
        raise wrong_format(path, text, "cbtest_CN_valid_2000ex.txt or the like")
    return found


def _cloze(place: str, sentences: Sequence[str], line: str) -> Cloze:
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
    return Cloze(before, " ".join(words[blank + 1 :]), candidates, answer)


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


def _text(row: dict[str, Any]) -> str:
    return json.dumps({"text": row["text"]}) + "\n"


def _story(row: dict[str, Any]) -> str:
    question = f"{row['question']}\t{row['answer']}\t\t{'|'.join(row['options'])}\n"
    return "".join(f"{number} {line}\n" for number, line in enumerate([*row["sentences"], question], start=1))


def _filled(path: Path) -> list[str]:
    return [cloze.filled(cloze.answer) for cloze in clozes(path)]


def _cbt(kind: str, what: str) -> DataSet:
    file = f"cbtest_{kind}_valid_2000ex.txt"
    source = HubSource("cam-cst/cbt", kind, "validation", file, _story)
    return DataSet(f"cbt_{kind.lower()}", f"{what} of the Children's Book Test, {file}", source, texts=_filled)


LAMBADA_OPENAI = DataSet(
    "lambada_openai",
    'OpenAI\'s variant of the LAMBADA test set: 5,153 JSON lines {"text": …}',
    HubSource("EleutherAI/lambada_openai", "default", "test", "lambada_openai.jsonl", _text),
    sha256="4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
    texts=passages,
)
LAMBADA_STANDARD = DataSet(
    "lambada_standard",
    'LAMBADA\'s original, lower-case test set as JSON lines {"text": …}',
    HubSource("cimec/lambada", None, "test", "lambada_standard.jsonl", _text),
    texts=passages,
)
CBT_CN, CBT_NE = _cbt("CN", "Common nouns"), _cbt("NE", "Named entities")

FAMILY = Family(
    "missing_word",
    [
        LastWord(LAMBADA_OPENAI),
        LastToken(LAMBADA_OPENAI),
        LastWord(LAMBADA_STANDARD),
        MissingWord(CBT_CN),
        MissingWord(CBT_NE),
    ],
    section=section_of_test_sets,
)
