"""Shard folders with the tokens that a test chooses, written by the real writer, and their batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tost_lm.data.loader import BatchShard, Corpora, TrainingBatches
from tost_lm.data.shard_format import FRESH, SplitWriter
from tost_lm.data.shards import Shards
from tost_lm.data.stages import Packing
from tost_lm.ops.layout import SequenceSplit

EOT, IGNORED, T, BATCH = 0, -100, 20, 8
LENGTHS = [1 + 37 * i % 49 for i in range(60)]


def hand_made(
    folder: Path,
    lengths: Sequence[int],
    *,
    first: int = 1,
    vocab_size: int = 10**9,
    shard_tokens: int = 10**9,
    tokenizer: str = "one",
    split: str = "train",
    loss_mask: np.ndarray | None = None,
) -> Shards:
    """Documents of these lengths with the tokens `first`, `first` + 1, …

    A small vocabulary repeats tokens and ends each document with the end-of-text id. `loss_mask`: of all tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.arange(first, first + sum(lengths), dtype=np.int32)
    if vocab_size < first + len(tokens):
        tokens = 1 + tokens % (vocab_size - 1)
        tokens[np.cumsum(lengths) - 1] = EOT
    writer = SplitWriter(folder, split, "int32", shard_tokens, FRESH)
    mask = np.ones(len(tokens), np.uint8) if loss_mask is None else loss_mask
    for start, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        one = slice(start, start + length)
        writer.add(tokens[one], np.array([length]), np.array([4 * length]), mask[one])
    return Shards(
        folder,
        {
            "tokenizer": {"sha256": tokenizer, "vocab_size": vocab_size, "eot": EOT},
            "dtype": "int32",
            "splits": {split: writer.finish()},
        },
    )


def batches_of(corpora: Corpora, packing: Packing, ranks: str = "0/1 0/1", **changes: Any) -> TrainingBatches:
    """The batches of the rank `data rank/data ranks sequence rank/sequence ranks`."""
    (data, data_ranks), (sequence, sequence_ranks) = (map(int, pair.split("/")) for pair in ranks.split())
    settings = {"seed": 1, "global_batch_size": BATCH, "micro_batch_size": 2, "seq_len": T, **changes}
    row = settings["seq_len"] * (settings["micro_batch_size"] if packing == "best-fit" else 1)
    split = SequenceSplit.even(row, sequence_ranks, sequence)
    shard = BatchShard(data, data_ranks, ((split.start, split.end),))
    return TrainingBatches(corpora, shard, packing=packing, ignored_label=IGNORED, **settings)
