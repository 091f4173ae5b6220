"""What a shard folder holds: the manifest, the hashes in it, and Megatron's .idx files.

A folder has for each shard NAME.bin (token ids, document after document) and NAME.idx (where documents lie), the
tokenizer in its one file and manifest.json with the sizes and hashes of all these and of itself; also bad_rows.jsonl, a
log, if rows of the corpus could not be read.
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
AGAIN = "build the shards again with python -m data_prep.build_shards"

# Magic, version 1, NumPy type code, number of sequences, entries of the document index (documents + 1).
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_MAGIC = b"MMIDIDX\x00\x00"
DTYPE_CODES = {"int32": 4, "uint16": 8}


class ShardEntry(Section):
    """One shard: its files are `name`.bin and `name`.idx; `bytes` counts the documents' text in UTF-8.

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
    """Rows of the corpus: all that were read, those that could not be, and those that the settings leave out."""

    read: int
    bad: int
    left_out: int


class TokenizerEntry(Section):
    """The tokenizer that made the tokens."""

    sha256: str
    vocab_size: int
    eot: int


class Manifest(Section):
    """The whole of manifest.json, its own hash apart."""

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
        DataError: there is none, it is of another format, or a byte of it is not as it was written.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError:
        raise DataError(f"{folder}: not a shard folder; python -m data_prep.build_shards makes one") from None
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
        raise DataError(f"{path}: damaged, it is not as it was written; {AGAIN}")
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
    """Megatron's .idx of documents of so many tokens [documents], each one sequence."""
    import numpy as np

    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = (ends - lengths) * np.dtype(dtype).itemsize
    header = INDEX_HEADER.pack(INDEX_MAGIC, 1, DTYPE_CODES[dtype], len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    return header + lengths.astype(np.int32).tobytes() + offsets.astype(np.int64).tobytes() + documents.tobytes()


def read_lengths(path: Path, documents: int, xxh3: str) -> "np.ndarray":
    """Tokens of each document, int32 [documents], from an .idx file. Raises DataError if it is not the one hashed."""
    import numpy as np

    data = path.read_bytes()
    if xxhash.xxh3_128_hexdigest(data) != xxh3:
        raise DataError(f"{path}: damaged, its hash is not the manifest's; {AGAIN}")
    return np.frombuffer(data, np.int32, documents, INDEX_HEADER.size).copy()  # the rest is five times as much
