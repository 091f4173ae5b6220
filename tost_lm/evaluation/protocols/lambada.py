"""LAMBADA: the last word of a passage, which cannot be guessed from its last sentence alone (arXiv 1606.06031)."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.likelihood import Likelihoods
from tost_lm.evaluation.protocols.interface import Example, Protocol, Row, read_text, to_array
from tost_lm.evaluation.protocols.perplexity import with_error
from tost_lm.evaluation.scoring import bootstrap_error
from tost_lm.evaluation.windows import after_what_fits


class LastWord(Protocol):
    """`…@lm-eval`: the last word with the space before it, given the rest: right when each of its tokens is the
    likeliest; perplexity is of words."""

    headline = "accuracy"

    def __init__(self, data_set: str):
        self.name, self.data_set = f"{data_set}@lm-eval", data_set

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        return [self._example(text, tokenizer, window) for text in passages(path)]

    def _example(self, text: str, tokenizer: Tokenizer, window: int) -> Example:
        context, word = text.rsplit(" ", 1)
        begin, ids = len(tokenizer.encode(context)), np.array(tokenizer.encode(text), dtype=np.int64)
        begin = max(1, self.first_scored(begin, len(ids)))
        return Example((after_what_fits(ids, begin, window),), {"word": word})

    def first_scored(self, first_of_word: int, tokens: int) -> int:
        """The token that the score begins with."""
        return first_of_word

    def row(self, example: Example, scores: Likelihoods) -> Row:
        return {
            **example.facts,
            "tokens": int(scores.tokens[0]),
            "nats": float(scores.nats[0]),
            "right": bool(scores.is_greedy[0]),
        }

    def totals(self, rows: Sequence[Row]) -> Row:
        right, nats, one = to_array(rows, "right"), to_array(rows, "nats"), np.ones(len(rows))
        error = bootstrap_error(nats, one)
        return {
            "examples": len(rows),
            "accuracy": float(right.mean()),
            "accuracy_standard_error": bootstrap_error(right, one),
            "nats_per_word": float(nats.mean()),
            "nats_per_word_standard_error": error,
            **with_error("word_perplexity", float(nats.mean()), error),
            "words_of_one_token": int((to_array(rows, "tokens") == 1).sum()),
        }


class LastToken(LastWord):
    """`…@last-token`: the last token of the passage alone, given all before it, the rest of its word included."""

    by_token = True

    def __init__(self, data_set: str):
        self.name, self.data_set = f"{data_set}@last-token", data_set

    def first_scored(self, first_of_word: int, tokens: int) -> int:
        return tokens - 1

    def totals(self, rows: Sequence[Row]) -> Row:
        of_words = super().totals(rows)
        return {
            "examples": len(rows),
            "accuracy": of_words["accuracy"],
            "accuracy_standard_error": of_words["accuracy_standard_error"],
            "nats_per_token": of_words["nats_per_word"],
            "nats_per_token_standard_error": of_words["nats_per_word_standard_error"],
            "token_perplexity": of_words["word_perplexity"],
            "token_perplexity_standard_error": of_words["word_perplexity_standard_error"],
        }


def passages(path: Path) -> list[str]:
    """The texts of a file of JSON lines, {"text": …}. Raises DataError."""
    texts = []
    lines = read_text(path).split("\n")  # and not splitlines(): strings of JSON may hold other line ends
    for number, line in enumerate(lines[: -1 if lines[-1] == "" else None], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            raise DataError(f'{path}, line {number}: not JSON; each line must be {{"text": …}}') from None
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str) or " " not in text.strip():
            raise DataError(f'{path}, line {number}: no passage of two words and more under "text"')
        texts.append(text)
    if not texts:
        raise DataError(f"{path}: empty; give the test set as JSON lines")
    return texts
