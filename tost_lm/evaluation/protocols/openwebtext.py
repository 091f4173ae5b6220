"""OpenWebText: the validation tokens that nanoGPT's preparation script writes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.data_sets import unpacked
from tost_lm.evaluation.protocols.interface import GPT2_EOT, Example, is_gpt2_tokenizer
from tost_lm.evaluation.protocols.perplexity import TextProtocol
from tost_lm.evaluation.windows import disjoint_windows


class OpenWebText(TextProtocol):
    """`owt@nanogpt`: nats per token of val.bin, GPT-2's ids as 16-bit integers with an end of text after each document.

    Each token but the first is scored once, in disjoint windows. Ends of text count. The file has no words and bytes.
    nanoGPT itself averages random windows, whose expectation this is.
    """

    name, data_set, headline, by_token = "owt@nanogpt", "owt", "nats_per_token", True

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        ids = read_ids(path, tokenizer)
        return [Example((request,), {}) for request in disjoint_windows(ids[1:], int(ids[0]), window)]


def read_ids(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of val.bin, int64. Raises DataError if the format differs or the tokenizer is not GPT-2's."""
    if not is_gpt2_tokenizer(tokenizer):
        raise DataError(f"{path}: has ids of GPT-2's tokenizer, but the model has another; leave this protocol out")
    data = unpacked(path)
    ids = np.frombuffer(data[: len(data) // 2 * 2], dtype="<u2")
    # ASCII text has no end of text among its pairs of bytes.
    if len(data) % 2 or len(ids) < 2 or ids.max() != GPT2_EOT:
        raise DataError(
            f"{path}: wrong format, not ids of GPT-2's tokenizer as 16-bit integers with ends of text; give val.bin"
        )
    return ids.astype(np.int64)
