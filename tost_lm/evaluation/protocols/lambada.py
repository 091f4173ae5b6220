"""LAMBADA: the last word of a passage, which its last sentence alone does not determine (arXiv 1606.06031)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.likelihood import Likelihoods
from tost_lm.evaluation.protocols.interface import Example, Protocol, Row, read_json_lines, to_array
from tost_lm.evaluation.protocols.perplexity import with_error
from tost_lm.evaluation.scoring import bootstrap_error
from tost_lm.evaluation.windows import left_truncated


class LastWord(Protocol):
    """`…@lm-eval`: the last word with the space before it, given the rest. It is right if each of its tokens is the
    most likely one. Perplexity is per word."""

    headline = "accuracy"

    def __init__(self, data_set: str):
        self.name, self.data_set = f"{data_set}@lm-eval", data_set

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
        return {
            **accuracy_of(rows),
            "nats_per_word": float(nats.mean()),
            "nats_per_word_standard_error": error,
            **with_error("word_perplexity", float(nats.mean()), error),
            "words_of_one_token": int((to_array(rows, "tokens") == 1).sum()),
        }


class LastToken(LastWord):
    """`…@last-token`: the last token of the passage, given all tokens before it, also those of its word."""

    by_token = True

    def __init__(self, data_set: str):
        self.name, self.data_set = f"{data_set}@last-token", data_set

    def first_scored(self, first_of_word: int, tokens: int) -> int:
        return tokens - 1

    def totals(self, rows: Sequence[Row]) -> Row:
        of_words = super().totals(rows)
        return {
            **accuracy_of(rows),
            "nats_per_token": of_words["nats_per_word"],
            "nats_per_token_standard_error": of_words["nats_per_word_standard_error"],
            "token_perplexity": of_words["word_perplexity"],
            "token_perplexity_standard_error": of_words["word_perplexity_standard_error"],
        }


def accuracy_of(rows: Sequence[Row], measure: str = "") -> Row:
    """The number of examples, and the fraction of those whose `<measure>right` is true, with its standard error."""
    right = to_array(rows, f"{measure}right")
    error = right.std() / max(1, len(rows) - 1) ** 0.5
    name = f"{measure}accuracy"
    return {"examples": len(rows), name: float(right.mean()), f"{name}_standard_error": float(error)}


def passages(path: Path) -> list[str]:
    """The texts of a file of JSON lines {"text": …}. Raises DataError."""
    texts = []
    for place, row in read_json_lines(path, 'JSON lines {"text": …}'):
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str) or " " not in text.strip():
            raise DataError(f'{place}: no passage of two or more words under "text"; give the published file')
        texts.append(text)
    return texts
