"""What a shard folder holds: the manifest's fields and the header of Megatron's .idx files.

A folder has for each shard NAME.bin (token ids, document after document) and NAME.idx (where documents lie), the
tokenizer as tokenizer.model, and manifest.json with sizes and hashes of all of them.
"""

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tost_lm.config import Section
from tost_lm.errors import DataError

if TYPE_CHECKING:
    import numpy as np

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.model"
SPLITS = ("train", "valid")

# Magic, version 1, NumPy type code, number of sequences, entries of the document index (documents + 1).
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_MAGIC = b"MMIDIDX\x00\x00"
DTYPE_CODES = {"int32": 4, "uint16": 8}


class ShardEntry(Section):
    """One shard: its files are `name`.bin and `name`.idx; `bytes` counts the documents' text in UTF-8."""

    name: str
    documents: int
    tokens: int
    bytes: int
    bin_sha256: str
    idx_sha256: str


class SplitEntry(Section):
    """One split: totals and its shards in reading order."""

    documents: int
    tokens: int
    bytes: int
    shards: list[ShardEntry]


class SplitsEntry(Section):
    """The two splits."""

    train: SplitEntry
    valid: SplitEntry


class TokenizerEntry(Section):
    """The tokenizer that made the tokens."""

    sha256: str
    vocab_size: int
    eot: int


class Manifest(Section):
    """The whole of manifest.json."""

    format: Literal["tost_lm.shards.v1"]
    tool_version: str
    source: str
    source_fingerprint: str
    heldout_share: float
    shard_tokens: int
    tokenizer: TokenizerEntry
    dtype: Literal["uint16", "int32"]
    splits: SplitsEntry


def dtype_for(vocab_size: int) -> Literal["uint16", "int32"]:
    """The NumPy type that holds ids below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "int32"


def index_bytes(documents: int) -> int:
    """Size of the .idx file of a shard: header, int32 lengths, int64 byte offsets, int64 document index."""
    return INDEX_HEADER.size + documents * (4 + 8) + (documents + 1) * 8


def read_lengths(path: Path, dtype: str, documents: int, tokens: int) -> "np.ndarray":
    """Tokens of each document, int32 [documents], from an .idx file written with one sequence per document.

    Raises:
        DataError: the file does not describe a .bin file of that many documents and tokens of that type.
    """
    # Megatron's own reader costs 7 s of imports in every rank and an extra that scoring does not need.
    import numpy as np

    damaged = DataError(f"{path}: damaged; build the shards again with python -m data_prep.build_shards")
    data = path.read_bytes()
    if len(data) != index_bytes(documents):
        raise damaged
    if INDEX_HEADER.unpack_from(data) != (INDEX_MAGIC, 1, DTYPE_CODES[dtype], documents, documents + 1):
        raise damaged
    lengths = np.frombuffer(data, np.int32, documents, INDEX_HEADER.size)
    offsets = np.frombuffer(data, np.int64, documents, INDEX_HEADER.size + lengths.nbytes)
    ends = np.cumsum(lengths, dtype=np.int64)
    if (
        lengths.min() < 1
        or ends[-1] != tokens
        or not np.array_equal(offsets, (ends - lengths) * np.dtype(dtype).itemsize)
    ):
        raise damaged
    return lengths
