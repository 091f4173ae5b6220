"""Reads a shard folder with NumPy; tokens are memory-mapped."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tost_lm.data.shard_format import (
    AGAIN,
    BAD_ROWS,
    HASH_BLOCK_BYTES,
    SPLITS,
    block_hashes,
    index_size,
    read_lengths,
    read_manifest,
)
from tost_lm.data.tokenizers import Tokenizer, find_tokenizer, read_tokenizer
from tost_lm.errors import DataError
from tost_lm.files import sha256_bytes, sha256_file

if TYPE_CHECKING:
    import numpy as np


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
        import numpy as np

        shards = cls(folder, read_manifest(folder))
        itemsize = np.dtype(shards.manifest["dtype"]).itemsize
        for split in SPLITS:
            for entry in shards.entries(split):
                _check_size(folder / f"{entry['name']}.bin", entry["tokens"] * itemsize)
                _check_size(folder / f"{entry['name']}.idx", index_size(entry["documents"]))
        shards._check_tokenizer()
        return shards

    def verify(self, *splits: str) -> None:
        """The full check of the named splits (default: all): read every byte and compare the hashes.

        Raises:
            DataError: a hash differs; names the file and, for a .bin, the byte range.
        """
        for split in splits or SPLITS:
            for entry in self.entries(split):
                self._lengths(entry)
                path = self.folder / f"{entry['name']}.bin"
                for number, (found, hashed) in enumerate(zip(block_hashes(path), entry["bin_xxh3"], strict=True)):
                    if found != hashed:
                        start = number * HASH_BLOCK_BYTES
                        end = min(start + HASH_BLOCK_BYTES, path.stat().st_size)
                        raise DataError(
                            f"{path}: damaged between bytes {start:,} and {end:,}, their hash differs from the "
                            f"manifest; {AGAIN}"
                        )
        self._check_tokenizer()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made these tokens."""
        return read_tokenizer(find_tokenizer(self.folder))

    def entries(self, split: str) -> list[dict[str, Any]]:
        """The manifest entries of the shards of a split, in reading order."""
        return self.manifest["splits"][split]["shards"]

    def token_arrays(self, split: str) -> "list[np.memmap]":
        """The tokens of each shard as a read-only memory map [tokens] of the manifest's dtype."""
        import numpy as np

        paths = [self.folder / f"{entry['name']}.bin" for entry in self.entries(split)]
        return [np.memmap(path, dtype=self.manifest["dtype"], mode="r") for path in paths]

    def lengths(self, split: str) -> "list[np.ndarray]":
        """Tokens of each document of each shard, including its end-of-text id, int32 [documents].

        Raises:
            DataError: a damaged .idx file.
        """
        return [self._lengths(entry) for entry in self.entries(split)]

    def documents(self, split: str, first: int = 0) -> "Iterator[np.ndarray]":
        """The tokens [n] of each document from number `first`, without the end-of-text id.

        Raises:
            DataError: a damaged .idx file.
        """
        import numpy as np

        for entry, tokens in zip(self.entries(split), self.token_arrays(split), strict=True):
            lengths = self._lengths(entry)
            ends = np.cumsum(lengths, dtype=np.int64)
            for number in range(first, entry["documents"]):
                yield tokens[ends[number] - lengths[number] : ends[number] - 1]
            first = max(first - entry["documents"], 0)

    def bad_rows(self) -> list[dict[str, str]]:
        """A sample of the unreadable rows: `where` and `reason` of each."""
        path = self.folder / BAD_ROWS
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def _lengths(self, entry: dict[str, Any]) -> "np.ndarray":
        return read_lengths(self.folder / f"{entry['name']}.idx", entry["documents"], entry["idx_xxh3"])

    def _check_tokenizer(self) -> None:
        path = find_tokenizer(self.folder)
        if sha256_file(path) != self.manifest["tokenizer"]["sha256"]:
            raise DataError(f"{path}: wrong tokenizer for the shards, its SHA-256 differs from the manifest; {AGAIN}")


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise DataError(f"{path}: missing; {AGAIN}")
    if path.stat().st_size != size:
        raise DataError(f"{path}: damaged, {path.stat().st_size} bytes instead of {size}; {AGAIN}")


class Concatenation:
    """Concatenated arrays [n]; only `read` copies."""

    def __init__(self, arrays: "Sequence[np.ndarray]") -> None:
        import numpy as np

        self._arrays = [np.asarray(array) for array in arrays]  # slicing an np.memmap takes 2 µs
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start_S: "np.ndarray", length_S: "np.ndarray", dtype: "type[np.generic]") -> "np.ndarray":
        """The elements [start, start + length) of each segment, concatenated, as `dtype`. No segment may be empty."""
        import numpy as np

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
    import numpy as np

    exponents = np.frexp(lengths)[1] - 1  # 2^e ≤ length < 2^(e + 1), exactly
    counts = np.bincount(exponents)
    return [Bucket(1 << e, (2 << e) - 1, int(counts[e])) for e in range(int(exponents.min()), len(counts))]


def token_counts(shards: Shards, split: str) -> "np.ndarray":
    """Occurrences of each token id, int64 [vocab_size]."""
    import numpy as np

    counts = np.zeros(shards.vocab_size, np.int64)
    for tokens in shards.token_arrays(split):
        for start in range(0, len(tokens), COUNTED_TOKENS):
            counts += np.bincount(tokens[start : start + COUNTED_TOKENS], minlength=shards.vocab_size)
    return counts
