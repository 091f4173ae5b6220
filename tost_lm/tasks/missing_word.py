"""LAMBADA: the last word of a passage, which its last sentence alone does not determine (arXiv 1606.06031)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    section_of_test_sets,
    to_array,
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


def _text(row: dict[str, Any]) -> str:
    return json.dumps({"text": row["text"]}) + "\n"


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

FAMILY = Family(
    "missing_word",
    [LastWord(LAMBADA_OPENAI), LastToken(LAMBADA_OPENAI), LastWord(LAMBADA_STANDARD)],
    section=section_of_test_sets,
)
