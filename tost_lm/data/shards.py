"""Reads a shard folder with NumPy; tokens are memory-mapped and checked on first use."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from tost_lm.data.shard_format import (
    AGAIN,
    BAD_ROWS,
    HASH_BLOCK_BYTES,
    SPLITS,
    TEXT_BYTES,
    file_sizes,
    read_lengths,
    read_manifest,
)
from tost_lm.data.tokenizers import Tokenizer, find_tokenizer, read_tokenizer
from tost_lm.errors import DataError
from tost_lm.files import regular_file, sha256_bytes, sha256_file


class Shards:
    """An opened shard folder.

    `manifest` is the content of manifest.json. `fingerprint` (hex SHA-256) identifies the tokens and the tokenizer; it
    does not depend on the path of the corpus.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        tokens = {key: manifest[key] for key in ("tokenizer", "dtype", "splits")}
        self.fingerprint = sha256_bytes(json.dumps(tokens, sort_keys=True).encode())
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.eot: int = manifest["tokenizer"]["eot"]

    @classmethod
    def open(cls, folder: Path) -> "Shards":
        """Open a folder after a fast check: the manifest's hash, all file sizes and the tokenizer's hash.

        Raises:
            DataError: not a shard folder, an unknown format, a missing or truncated file, or another tokenizer.
        """
        shards = cls(folder, read_manifest(folder))
        for split in SPLITS:
            for entry in shards.entries(split):
                for ending, size in zip(("bin", "idx"), file_sizes(entry, shards.manifest["dtype"]), strict=True):
                    _check_size(folder / f"{entry['name']}.{ending}", size)
        shards._check_tokenizer()
        return shards

    def verify(self, *splits: str) -> None:
        """The full check of the named splits (default: all): read everything that has a hash and compare it.

        Raises:
            DataError: a hash differs, or as `TokenShard`.
        """
        for split in splits or SPLITS:
            for entry in self.entries(split):
                self.document_lengths(entry)
                if "partition" in self.manifest["settings"]:
                    self.text_bytes(entry)
            for shard in self.token_arrays(split):
                shard.verify()
        self._check_tokenizer()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made these tokens."""
        return read_tokenizer(find_tokenizer(self.folder))

    def entries(self, split: str) -> list[dict[str, Any]]:
        """The manifest entries of the shards of a split, in reading order."""
        return self.manifest["splits"][split]["shards"]

    def token_arrays(self, split: str) -> "list[TokenShard]":
        """The tokens of each shard [tokens], of the manifest's dtype."""
        return [self.tokens(entry) for entry in self.entries(split)]

    def tokens(self, entry: dict[str, Any]) -> "TokenShard":
        """The tokens of a shard [tokens], of the manifest's dtype."""
        return TokenShard(self.folder, entry, self.manifest["dtype"], self.vocab_size)

    def lengths(self, split: str) -> "list[np.ndarray]":
        """Tokens of each document of each shard, including its end-of-text id, int32 [documents].

        Raises:
            DataError: a damaged .idx file.
        """
        return [self.document_lengths(entry) for entry in self.entries(split)]

    def text_bytes(self, entry: dict[str, Any]) -> "np.ndarray":
        """Bytes of text of each document of a shard of a partition, int64 [documents]. Raises DataError if damaged."""
        path = self.folder / f"{entry['name']}.{TEXT_BYTES}"
        _check_size(path, entry["documents"] * 8)
        sizes = np.fromfile(path, np.int64)
        if sizes.min() < 0 or sizes.sum() != entry["bytes"]:
            raise DataError(f"{path}: damaged, its sum differs from the manifest; {AGAIN}")
        return sizes

    def documents(self, split: str, first: int = 0) -> "Iterator[np.ndarray]":
        """The tokens [n] of each document from number `first`, without the end-of-text id.

        Raises:
            DataError: a damaged .idx file, or as `TokenShard`.
        """
        for entry, tokens in zip(self.entries(split), self.token_arrays(split), strict=True):
            lengths = self.document_lengths(entry)
            ends = np.cumsum(lengths, dtype=np.int64)
            for number in range(first, entry["documents"]):
                document = tokens[ends[number] - lengths[number] : ends[number]]
                yield document[:-1] if document[-1] == self.eot else document  # linked documents may have none
            first = max(first - entry["documents"], 0)

    def texts(self, split: str) -> "Iterator[str]":
        """The text of each document. Raises as `documents`."""
        tokenizer = self.tokenizer()
        return (tokenizer.decode(ids.tolist()) for ids in self.documents(split))

    def bad_rows(self) -> list[dict[str, str]]:
        """A sample of the unreadable rows: `where` and `reason` of each."""
        path = self.folder / BAD_ROWS
        return [json.loads(line) for line in regular_file(path).read_text().splitlines()] if path.is_file() else []

    def document_lengths(self, entry: dict[str, Any]) -> "np.ndarray":
        """As `lengths`, of one shard, int32 [documents]."""
        return read_lengths(self.folder / f"{entry['name']}.idx", entry)

    def _check_tokenizer(self) -> None:
        path = find_tokenizer(self.folder)
        if sha256_file(path) != self.manifest["tokenizer"]["sha256"]:
            raise DataError(f"{path}: wrong tokenizer for the shards, its SHA-256 differs from the manifest; {AGAIN}")


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise DataError(f"{path}: missing; {AGAIN}")
    if path.stat().st_size != size:
        raise DataError(f"{path}: damaged, {path.stat().st_size} bytes instead of {size}; {AGAIN}")


class TokenShard:
    """The tokens of one shard [tokens], memory-mapped. Slices are read-only views.

    A block is checked once, before its first use: against its hash, and its ids against the vocabulary. Later changes
    of the block are not seen. A forked process does not know what its parent checks afterwards.
    """

    def __init__(self, folder: Path, entry: dict[str, Any], dtype: str, vocab_size: int) -> None:
        """`entry` of the manifest. Raises DataError if the file is missing or has another size."""
        self._path, self._tokens, self._hashes = folder / f"{entry['name']}.bin", entry["tokens"], entry["bin_xxh3"]
        self._bytes, self._vocab_size = file_sizes(entry, dtype)[0], vocab_size
        self.check_size()
        self._start = entry["linked"]["first_token"] * np.dtype(dtype).itemsize if "linked" in entry else 0
        # A slice of an np.memmap takes 2 µs.
        self._array = np.asarray(np.memmap(regular_file(self._path), dtype, "r", self._start, (self._tokens,)))
        self._block_tokens = HASH_BLOCK_BYTES // self._array.itemsize
        self._checked = bytearray(-(-self._tokens // self._block_tokens))

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, wanted: slice) -> "np.ndarray":
        """Raises DataError if a block of these tokens is damaged; names the file and the byte range."""
        start, stop, _ = wanted.indices(self._tokens)
        first, end = start // self._block_tokens, -(-stop // self._block_tokens)
        while (block := self._checked.find(0, first, end)) >= 0:
            self._check(block)
        return self._array[start:stop]

    def verify(self) -> None:
        """Check all blocks that have a hash. Raises DataError as a slice."""
        self[: len(self._hashes) * self._block_tokens]

    def check_size(self) -> None:
        """Raises DataError if the file is missing or has another size than in the manifest."""
        _check_size(self._path, self._bytes)

    def _check(self, block: int) -> None:
        self.check_size()  # the kernel ends a process that reads a map after the end of its file
        first = block * self._block_tokens
        tokens = self._array[first : first + self._block_tokens]
        start = self._start + first * tokens.itemsize
        if block < len(self._hashes) and xxhash.xxh3_128_hexdigest(tokens.data) != self._hashes[block]:
            raise DataError(
                f"{self._path}: damaged between bytes {start:,} and {start + tokens.nbytes:,}, their hash differs from "
                f"the manifest; {AGAIN}"
            )
        unsigned = tokens.view(f"u{tokens.itemsize}")
        if unsigned.max() >= self._vocab_size:
            place = int(unsigned.argmax())
            raise DataError(
                f"{self._path}: token id {tokens[place]} at byte {start + place * tokens.itemsize:,} is not in the "
                f"vocabulary of {self._vocab_size:,}; {AGAIN}"
            )
        self._checked[block] = 1


class Concatenation:
    """Concatenated arrays or shards [n]; only `read` copies."""

    def __init__(self, arrays: "Sequence[np.ndarray | TokenShard]") -> None:
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start_S: "np.ndarray", length_S: "np.ndarray", dtype: "type[np.generic]") -> "np.ndarray":
        """The elements [start, start + length) of each segment, concatenated, as `dtype`. No segment may be empty."""
        number_S = np.searchsorted(self._ends, start_S, "right")
        left_S = self._ends[number_S] - start_S
        views = []
        for number, left, length in zip(number_S.tolist(), left_S.tolist(), length_S.tolist(), strict=True):
            array = self._arrays[number]
            views.append(array[len(array) - left : len(array) - left + length])
            while length > left:  # continues in the next array
                length, number = length - left, number + 1
                views.append(self._arrays[number][:length])
                left = len(self._arrays[number])
        out = np.empty(length_S.sum(), dtype=dtype)
        return np.concatenate(views, out=out, casting="unsafe") if views else out


COUNTED_TOKENS = 1 << 24  # at once, to bound memory


class Bucket(NamedTuple):
    """Number of documents of `shortest` to `longest` tokens, including the end-of-text id."""

    shortest: int
    longest: int
    documents: int


def length_histogram(lengths: "np.ndarray") -> list[Bucket]:
    """Buckets by powers of 2, from the shortest document to the longest. `lengths` [documents] ≥ 1."""
    exponents = np.frexp(lengths)[1] - 1  # 2^e ≤ length < 2^(e + 1), exactly
    counts = np.bincount(exponents)
    return [Bucket(1 << e, (2 << e) - 1, int(counts[e])) for e in range(int(exponents.min()), len(counts))]


def token_counts(shards: Shards, split: str) -> "np.ndarray":
    """Occurrences of each token id, int64 [vocab_size]. Raises DataError as `TokenShard`."""
    counts = np.zeros(shards.vocab_size, np.int64)
    for tokens in shards.token_arrays(split):
        for start in range(0, len(tokens), COUNTED_TOKENS):
            counts += np.bincount(tokens[start : start + COUNTED_TOKENS], minlength=shards.vocab_size)
    return counts
