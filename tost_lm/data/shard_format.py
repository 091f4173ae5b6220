"""The format of a shard folder: the manifest with its hashes, and Megatron's .idx files.

A shard is NAME.bin (token ids, document after document) and NAME.idx (offsets of documents). The folder also holds the
tokenizer's file, manifest.json with the sizes and hashes of all files, and bad_rows.jsonl if rows could not be read.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash
from pydantic import ValidationError

from tost_lm.config import Section
from tost_lm.errors import DataError
from tost_lm.files import manifest_bytes

if TYPE_CHECKING:
    import numpy as np

FORMAT = "tost_lm.shards.v2"
MANIFEST = "manifest.json"
BAD_ROWS = "bad_rows.jsonl"
SPLITS = ("train", "valid", "test")
HASH_BLOCK_BYTES = 1 << 24
AGAIN = "rebuild the shards with tost prepare shards"

# Magic, version 1, NumPy type code, number of sequences, entries of the document index (documents + 1).
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_MAGIC = b"MMIDIDX\x00\x00"
DTYPE_CODES = {"int32": 4, "uint16": 8}


class ShardEntry(Section):
    """One shard, `name`.bin and `name`.idx; `bytes` counts the text in UTF-8.

    Hashes are XXH3-128 in hex, of the whole .idx and of each 16 MiB of the .bin.
    """

    name: str
    documents: int
    tokens: int
    bytes: int
    idx_xxh3: str
    bin_xxh3: list[str]


class SplitEntry(Section):
    """One split: totals and its shards in reading order."""

    documents: int
    tokens: int
    bytes: int
    shards: list[ShardEntry]


class SplitsEntry(Section):
    """The three splits; all but train may be empty."""

    train: SplitEntry
    valid: SplitEntry
    test: SplitEntry


class RowsEntry(Section):
    """Numbers of rows: read from the corpus; unreadable (`bad`); excluded by their length (`left_out`)."""

    read: int
    bad: int
    left_out: int


class TokenizerEntry(Section):
    """The tokenizer that made the tokens."""

    sha256: str
    vocab_size: int
    eot: int


class Manifest(Section):
    """The content of manifest.json without its own hash."""

    format: Literal["tost_lm.shards.v2"]
    tool_version: str
    source: str
    source_fingerprint: str
    settings: dict[str, Any]
    tokenizer: TokenizerEntry
    dtype: Literal["uint16", "int32"]
    rows: RowsEntry
    splits: SplitsEntry


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a shard folder, without its hash.

    Raises:
        DataError: it is missing, of another format or damaged.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError:
        raise DataError(f"{folder}: not a shard folder; build one with tost prepare shards") from None
    try:
        tree = json.loads(data)
        tree.pop("xxh3")
        manifest = Manifest.model_validate_json(json.dumps(tree)).model_dump()
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise DataError(f"{path}: damaged or not {FORMAT} ({where}: {problem['msg']}); {AGAIN}") from None
    except (ValueError, KeyError, AttributeError):
        raise DataError(f"{path}: damaged or not {FORMAT}; {AGAIN}") from None
    if manifest_bytes(manifest) != data:
        raise DataError(f"{path}: damaged, its content does not match its hash; {AGAIN}")
    return manifest


def dtype_for(vocab_size: int) -> Literal["uint16", "int32"]:
    """The NumPy type that holds ids below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "int32"


def block_hashes(path: Path) -> Iterator[str]:
    """XXH3-128 of each 16 MiB of a file."""
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            yield xxhash.xxh3_128_hexdigest(block)


def index_size(documents: int) -> int:
    """Bytes of the .idx file of a shard: header, int32 lengths, int64 byte offsets, int64 document index."""
    return INDEX_HEADER.size + documents * (4 + 8) + (documents + 1) * 8


def index_bytes(lengths: "np.ndarray", dtype: str) -> bytes:
    """Megatron's .idx file for documents of these lengths in tokens [documents]."""
    import numpy as np

    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = (ends - lengths) * np.dtype(dtype).itemsize
    header = INDEX_HEADER.pack(INDEX_MAGIC, 1, DTYPE_CODES[dtype], len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    return header + lengths.astype(np.int32).tobytes() + offsets.astype(np.int64).tobytes() + documents.tobytes()


def read_lengths(path: Path, documents: int, xxh3: str) -> "np.ndarray":
    """Tokens of each document, int32 [documents], from an .idx file. Raises DataError if its hash differs."""
    import numpy as np

    data = path.read_bytes()
    if xxhash.xxh3_128_hexdigest(data) != xxh3:
        raise DataError(f"{path}: damaged, its hash differs from the manifest; {AGAIN}")
    return np.frombuffer(data, np.int32, documents, INDEX_HEADER.size).copy()  # frees the rest of the file
