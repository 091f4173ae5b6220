"""OpenWebText, the validation split that nanoGPT's preparation script draws, as the tokens that it writes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.data_sets import unpacked
from tost_lm.evaluation.protocols.interface import Example, is_gpt2s
from tost_lm.evaluation.protocols.perplexity import TextProtocol
from tost_lm.evaluation.windows import disjoint_windows

GPT2_WORDS = 50257


class OpenWebText(TextProtocol):
    """`owt@nanogpt`: nats a token of val.bin, GPT-2's ids as 16-bit integers with an end of text after each document.

    Each token but the first is scored once, in disjoint windows; ends of text count, and words and bytes are not known.
    nanoGPT itself takes the mean of random windows, whose expectation this is.
    """

    name, data_set, headline, by_token = "owt@nanogpt", "owt", "nats_per_token", True

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        ids = read_ids(path, tokenizer)
        return [Example((request,), {}) for request in disjoint_windows(ids[1:], int(ids[0]), window)]


def read_ids(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of val.bin, int64. Raises DataError where it is no such file, or the tokenizer is not GPT-2's."""
    if not is_gpt2s(tokenizer):
        raise DataError(f"{path}: tokens of GPT-2's tokenizer, and the model has another: leave this protocol out")
    data = unpacked(path)
    ids = np.frombuffer(data[: len(data) // 2 * 2], dtype="<u2")
    if len(data) % 2 or len(ids) < 2 or ids.max() >= GPT2_WORDS:
        raise DataError(f"{path}: no file of GPT-2's ids as 16-bit integers; give val.bin")
    return ids.astype(np.int64)
