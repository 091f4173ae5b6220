"""Shard folders with the tokens that a test chooses, written by the real writer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tost_lm.data.shard_format import FRESH, SplitWriter
from tost_lm.data.shards import Shards

EOT = 0


def hand_made(
    folder: Path,
    lengths: Sequence[int],
    *,
    first: int = 1,
    vocab_size: int = 10**9,
    shard_tokens: int = 10**9,
    tokenizer: str = "one",
    split: str = "train",
) -> Shards:
    """Documents of these lengths with the tokens `first`, `first` + 1, …

    A small vocabulary repeats tokens and ends each document with the end-of-text id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.arange(first, first + sum(lengths), dtype=np.int32)
    if vocab_size < first + len(tokens):
        tokens = 1 + tokens % (vocab_size - 1)
        tokens[np.cumsum(lengths) - 1] = EOT
    writer = SplitWriter(folder, split, "int32", shard_tokens, FRESH)
    for start, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        writer.add(tokens[start : start + length], np.array([length]), np.array([4 * length]))
    return Shards(
        folder,
        {
            "tokenizer": {"sha256": tokenizer, "vocab_size": vocab_size, "eot": EOT},
            "dtype": "int32",
            "splits": {split: writer.finish()},
        },
    )
