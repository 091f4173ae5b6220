"""Base of the protocols for running text: nats per token, word and byte, each with its denominator."""

import math
from collections.abc import Iterable, Sequence

from tost_lm.evaluation.likelihood import Likelihoods, Request
from tost_lm.evaluation.protocols.interface import Example, Protocol, Row, to_array
from tost_lm.evaluation.scoring import bootstrap_error

LARGEST_EXPONENT = 700.0


class TextProtocol(Protocol):
    """Scores each target token once. Examples are texts with `words` and `bytes` in their facts, or windows of one
    text, the first of which has those of the whole text."""

    def row(self, example: Example, scores: Likelihoods) -> Row:
        return {"tokens": int(scores.tokens.sum()), **example.facts, "nats": float(scores.nats.sum())}

    def totals(self, rows: Sequence[Row]) -> Row:
        nats, tokens = to_array(rows, "nats"), to_array(rows, "tokens")
        words, size = (sum(row.get(key, 0) for row in rows) for key in ("words", "bytes"))
        total, count = float(nats.sum()), int(tokens.sum())
        error = bootstrap_error(nats, tokens)
        totals = {
            "examples": len(rows),
            "tokens": count,
            "nats": total,
            "nats_per_token": total / count,
            "nats_per_token_standard_error": error,
            **with_error("token_perplexity", total / count, error),
        }
        if not size:
            return totals
        return totals | {
            "words": words,
            "bytes": size,
            **with_error("word_perplexity", total / words, error * count / words),
            **with_error("byte_perplexity", total / size, error * count / size),
            "bits_per_byte": total / size / math.log(2),
            "bits_per_byte_standard_error": error * count / size / math.log(2),
        }


def windows_of(windows: Iterable[Request], words: int, text: str) -> list[Example]:
    """Examples for the windows of one text, which has `words` words."""
    facts = {"words": words, "bytes": len(text.encode())}
    return [Example((window,), {} if number else facts) for number, window in enumerate(windows)]


def with_error(name: str, nats: float, error: float) -> Row:
    """The perplexity of mean nats and its standard error, from that of the nats to first order."""
    perplexity = math.exp(nats) if nats < LARGEST_EXPONENT else math.inf
    return {name: perplexity, f"{name}_standard_error": perplexity * error}
