"""The format of a shard folder: the manifest with its hashes, and Megatron's .idx files.

A shard is NAME.bin (token ids, document after document) and NAME.idx (offsets of documents); where some tokens do not
count in the loss, also NAME.loss_mask (a byte a token, 1: it counts). The folder also holds the tokenizer's file,
manifest.json with the sizes and hashes of all files, and bad_rows.jsonl if rows could not be read.
Token files that Megatron wrote are linked: NAME.bin and NAME.idx are links to them, and the shard is some of their
documents.

A killed build resumes from its last commit with the same bytes: documents are appended in the order of the corpus, a
commit flushes the files and returns their sizes, and to resume, the files are truncated to these sizes. megatron-core's
builder cannot reopen a shard, so this module writes the index; a test reads it with megatron-core.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

import numpy as np
import xxhash
from pydantic import Field, ValidationError

from tost_lm.config import Section, read_toml, recipes
from tost_lm.errors import DataError, first_problem
from tost_lm.files import flush, manifest_content, regular_file

FORMAT = "tost_lm.shards.v3"
MANIFEST = "manifest.json"
BAD_ROWS = "bad_rows.jsonl"
LOSS_MASK = "loss_mask"
SPLITS = ("train", "valid", "test")
HASH_BLOCK_BYTES = 1 << 20
"""Read whole when one of its tokens is first used, so it is small: a sample may be a few kB of it."""
AGAIN = "rebuild the shards with tost prepare shards"

# Magic, version 1, NumPy type code, number of sequences, entries of the document index (documents + 1).
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_MAGIC = b"MMIDIDX\x00\x00"
DTYPE_CODES = {"int32": 4, "uint16": 8}
ITEM_BYTES = {"int32": 4, "uint16": 2}

Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class LinkedEntry(Section):
    """The linked files of a shard, and where it begins in them; documents without tokens do not count."""

    first_document: Count
    first_token: Count
    bin_bytes: Count
    idx_bytes: Count


class ShardEntry(Section):
    """One shard, `name`.bin and `name`.idx; `bytes` counts the text in UTF-8 (None: unknown).

    Hashes are XXH3-128 in hex, of the whole .idx and of each 1 MiB of the shard in the .bin. With a .loss_mask it has
    the hashes of each 1 MiB of it, and `counted`, the tokens that count.
    """

    name: str = Field(pattern=rf"^({'|'.join(SPLITS)})_[0-9]{{5,}}$")
    documents: Count = Field(gt=0)
    tokens: Count = Field(gt=0)
    bytes: Count | None
    idx_xxh3: Hash
    bin_xxh3: list[Hash]
    counted: Count | None = None
    loss_mask_xxh3: list[Hash] | None = None
    linked: LinkedEntry | None = None


class SplitEntry(Section):
    """One split: totals and its shards in reading order."""

    documents: Count
    tokens: Count
    bytes: Count | None
    shards: list[ShardEntry]


class RowsEntry(Section):
    """Numbers of rows: read from the corpus; unreadable (`bad`); excluded by their length (`left_out`)."""

    read: Count
    bad: Count
    left_out: Count


class TokenizerEntry(Section):
    """The tokenizer that made the tokens."""

    sha256: str
    vocab_size: int = Field(gt=0, lt=1 << 31)
    eot: int = Field(ge=0)
    chat_template: str | None = None
    """SHA-256 of the files of its chat template."""


class Manifest(Section):
    """The content of manifest.json without its own hash."""

    format: Literal["tost_lm.shards.v3"]
    tool_version: str
    source: str
    source_fingerprint: str
    settings: dict[str, Any]
    tokenizer: TokenizerEntry
    dtype: Literal["uint16", "int32"]
    rows: RowsEntry
    splits: dict[Literal["train", "valid", "test"], SplitEntry] = Field(min_length=len(SPLITS))
    """All but train may be empty."""


def _build_command(folder: Path) -> str:
    """The command that builds a shard folder, with the recipe that names it."""
    for name, file in recipes().items():
        if file.parent.name == "data" and read_toml(file).get("shards", {}).get("folder") == str(folder):
            return f"tost prepare tokenizer {name}, then tost prepare shards {name}"
    return "tost prepare shards"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a shard folder, without its hash.

    Raises:
        DataError: it is missing, of another format or damaged.
    """
    path = folder / MANIFEST
    try:
        data = regular_file(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder}: not a shard folder; build one with {_build_command(folder)}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {AGAIN}") from None
    content = manifest_content(data)
    if content is None:
        raise DataError(f"{path}: damaged, its content does not match its hash; {AGAIN}")
    try:
        return Manifest.model_validate_json(content).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise DataError(f"{path}: not {FORMAT} ({first_problem(error)}); {AGAIN}") from None


def dtype_for(vocab_size: int) -> Literal["uint16", "int32"]:
    """The NumPy type that holds ids below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "int32"


def block_hashes(path: Path, start: int = 0, end: int | None = None) -> Iterator[str]:
    """XXH3-128 of each block of the bytes [start, end) of a file, in hex."""
    with regular_file(path).open("rb") as file:
        file.seek(start)
        left = path.stat().st_size - start if end is None else end - start
        while block := file.read(min(HASH_BLOCK_BYTES, left)):
            left -= len(block)
            yield xxhash.xxh3_128_hexdigest(block)


def file_sizes(entry: dict[str, Any], dtype: str) -> dict[str, int]:
    """Bytes of each file of a shard, by its ending."""
    if linked := entry.get("linked"):
        return {"bin": linked["bin_bytes"], "idx": linked["idx_bytes"]}
    sizes = {"bin": entry["tokens"] * ITEM_BYTES[dtype], "idx": index_size(entry["documents"], entry["documents"])}
    return sizes | ({LOSS_MASK: entry["tokens"]} if f"{LOSS_MASK}_xxh3" in entry else {})


def counted_tokens(split: dict[str, Any]) -> int:
    """Tokens of a split, by its manifest entry, that count in the loss."""
    return sum(shard.get("counted", shard["tokens"]) for shard in split["shards"])


def index_size(sequences: int, documents: int) -> int:
    """Bytes of an .idx file: header, int32 lengths and int64 byte offsets of sequences, int64 document index."""
    return INDEX_HEADER.size + sequences * (4 + 8) + (documents + 1) * 8


def index_bytes(lengths: "np.ndarray", dtype: str) -> bytes:
    """Megatron's .idx file for documents of these lengths in tokens [documents]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = (ends - lengths) * np.dtype(dtype).itemsize
    header = INDEX_HEADER.pack(INDEX_MAGIC, 1, DTYPE_CODES[dtype], len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    return header + lengths.astype(np.int32).tobytes() + offsets.astype(np.int64).tobytes() + documents.tobytes()


class Index(NamedTuple):
    """The content of an .idx file."""

    dtype: str
    lengths: "np.ndarray"
    """Tokens of each document that has any, int32 [documents]."""
    empty: int
    """Documents without tokens."""


def parse_index(path: Path, data: bytes) -> Index:
    """The index with the bytes `data`, as Megatron writes it: a document may have several sequences.

    Raises:
        DataError: not an index, of tokens of another type, or damaged; the message names `path`.
    """
    again = "write or copy the file again"
    if len(data) < INDEX_HEADER.size or data[:17] != INDEX_HEADER.pack(INDEX_MAGIC, 1, 0, 0, 0)[:17]:
        raise DataError(f"{path}: not an index of Megatron's IndexedDataset; {again}")
    _, _, code, sequences, bounds = INDEX_HEADER.unpack_from(data)
    dtype = next((name for name, of_name in DTYPE_CODES.items() if of_name == code), None)
    if dtype is None:
        raise DataError(f"{path}: its tokens have type code {code}; write them as uint16 (8) or int32 (4)")
    if len(data) != index_size(sequences, bounds - 1):
        raise DataError(f"{path}: damaged, {len(data)} bytes instead of {index_size(sequences, bounds - 1)}; {again}")
    length_S = np.frombuffer(data, np.int32, sequences, INDEX_HEADER.size)
    offset_S = np.frombuffer(data, np.int64, sequences, INDEX_HEADER.size + 4 * sequences)
    bound_D = np.frombuffer(data, np.int64, bounds, INDEX_HEADER.size + 12 * sequences)
    end_S = np.concatenate([np.zeros(1, np.int64), np.cumsum(length_S, dtype=np.int64)])
    ascending = bounds and bound_D[0] == 0 and bound_D[-1] == sequences and (np.diff(bound_D) >= 0).all()
    if not ascending or (length_S < 0).any() or (offset_S != end_S[:-1] * ITEM_BYTES[dtype]).any():
        raise DataError(f"{path}: damaged, its lengths, offsets and documents do not agree; {again}")
    length_D = np.diff(end_S[bound_D])
    kept_D = length_D[length_D > 0].astype(np.int32)
    return Index(dtype, kept_D, len(length_D) - len(kept_D))


def read_lengths(path: Path, entry: dict[str, Any]) -> "np.ndarray":
    """Tokens of each document, int32 [documents], from the .idx file of a shard's manifest entry.

    Raises:
        DataError: its hash differs.
    """
    data = regular_file(path).read_bytes()
    if xxhash.xxh3_128_hexdigest(data) != entry["idx_xxh3"]:
        raise DataError(f"{path}: damaged, its hash differs from the manifest; {AGAIN}")
    first = entry["linked"]["first_document"] if "linked" in entry else 0
    return parse_index(path, data).lengths[first : first + entry["documents"]]


FRESH: dict[str, Any] = {"closed": [], "open": None}
LENGTHS = "lengths"
"""Ending of the file with the tokens (int32) of each document, until its index is written."""


class SplitWriter:
    """Writes the shards of one split to `folder`. The document that fills a shard closes it."""

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int, committed: dict[str, Any]) -> None:
        """`committed` is a result of `commit`, or FRESH for a new split.

        Raises:
            DataError: the files are shorter than the commit records.
        """
        self._folder = folder
        self._split = split
        self._dtype = np.dtype(dtype)
        self._shard_tokens = shard_tokens
        self.closed: list[dict[str, Any]] = list(committed["closed"])
        self._open: dict[str, Any] | None = None
        self._files: dict[str, IO[bytes]] = {}
        if shard := committed["open"]:
            self._open = dict(shard)
            extents = {
                "bin": shard["tokens"] * self._dtype.itemsize,
                LENGTHS: shard["documents"] * 4,
                **({LOSS_MASK: shard["tokens"]} if "counted" in shard else {}),
            }
            for ending, extent in extents.items():
                path = self._path(shard["name"], ending)
                if not path.is_file() or path.stat().st_size < extent:
                    raise DataError(f"{path}: shorter than at the last commit; delete {folder} and start again")
                os.truncate(path, extent)
                self._files[ending] = path.open("ab")

    def add(
        self, tokens: "np.ndarray", lengths: "np.ndarray", text_bytes: "np.ndarray", loss_mask: "np.ndarray"
    ) -> None:
        """Append documents: tokens [Σ lengths]; tokens and bytes of text of each document [documents]; and whether each
        token counts, uint8 [Σ lengths]."""
        while len(lengths):
            shard = self._open or self._begin_shard()
            ends = np.cumsum(lengths, dtype=np.int64)
            room = self._shard_tokens - shard["tokens"]
            count = min(int(np.searchsorted(ends, room)) + 1, len(lengths))  # up to the document that fills the shard
            self._files["bin"].write(tokens[: ends[count - 1]].astype(self._dtype, copy=False).tobytes())
            self._files[LENGTHS].write(lengths[:count].astype(np.int32).tobytes())
            self._add_mask(shard, loss_mask[: ends[count - 1]])
            shard["documents"] += count
            shard["tokens"] += int(ends[count - 1])
            shard["bytes"] += int(text_bytes[:count].sum())
            tokens, loss_mask = tokens[ends[count - 1] :], loss_mask[ends[count - 1] :]
            lengths, text_bytes = lengths[count:], text_bytes[count:]
            if shard["tokens"] >= self._shard_tokens:
                self._close_shard()

    def _add_mask(self, shard: dict[str, Any], loss_mask: "np.ndarray") -> None:
        """Append to the mask, which begins with the first token that does not count."""
        if LOSS_MASK not in self._files:
            if loss_mask.all():
                return
            self._files[LOSS_MASK] = self._path(shard["name"], LOSS_MASK).open("wb")
            self._files[LOSS_MASK].write(np.ones(shard["tokens"], np.uint8).tobytes())
            shard["counted"] = shard["tokens"]
        self._files[LOSS_MASK].write(loss_mask.tobytes())
        shard["counted"] += int(loss_mask.sum())

    def commit(self) -> dict[str, Any]:
        """Flush everything to disk and return the state to resume from, as plain JSON values."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {"closed": self.closed, "open": self._open and dict(self._open)}

    def total(self, what: str) -> int:
        """Sum of `documents`, `tokens` or `bytes` over all shards."""
        return sum(shard[what] for shard in [*self.closed, *([self._open] if self._open else [])])

    def finish(self) -> dict[str, Any]:
        """Close the last shard and return the manifest entry of the split."""
        if self._open:
            self._close_shard()
        return {what: self.total(what) for what in ("documents", "tokens", "bytes")} | {"shards": self.closed}

    def abandon(self) -> None:
        """Close the files without a commit."""
        for file in self._files.values():
            with suppress(OSError):  # data that cannot be written is after the last commit
                file.close()

    def _begin_shard(self) -> dict[str, Any]:
        name = f"{self._split}_{len(self.closed):05d}"
        self._files = {ending: self._path(name, ending).open("wb") for ending in ("bin", LENGTHS)}
        self._open = {"name": name, "documents": 0, "tokens": 0, "bytes": 0}
        return self._open

    def _close_shard(self) -> None:
        assert self._open is not None
        self.commit()
        for file in self._files.values():
            file.close()
        shard, self._open, self._files = self._open, None, {}
        lengths = np.fromfile(self._path(shard["name"], LENGTHS), np.int32)
        index = index_bytes(lengths, self._dtype.name)
        self._path(shard["name"], "idx").write_bytes(index)
        flush(self._path(shard["name"], "idx"))
        endings = ["bin", LOSS_MASK] if "counted" in shard else ["bin"]
        hashes = {f"{ending}_xxh3": list(block_hashes(self._path(shard["name"], ending))) for ending in endings}
        self.closed.append({**shard, "idx_xxh3": xxhash.xxh3_128_hexdigest(index), **hashes})

    def _path(self, name: str, ending: str) -> Path:
        return self._folder / f"{name}.{ending}"
