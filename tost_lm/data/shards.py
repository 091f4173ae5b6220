"""Reads a shard folder with NumPy. Tokens are checked on first use: of a local file, or at a URL read by blocks."""

import json
import os
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tost_lm.data.shard_format import (
    AGAIN,
    BAD_ROWS,
    HASH_BLOCK_BYTES,
    LOSS_MASK,
    SPLITS,
    file_sizes,
    read_lengths,
    read_manifest,
)
from tost_lm.data.tokenizers import Tokenizer, find_tokenizer, read_tokenizer
from tost_lm.errors import DataError
from tost_lm.files import read_rows, regular_file, sha256_bytes, sha256_file
from tost_lm.remote import (
    FETCHED_AT_ONCE,
    RemoteBlock,
    RemotePath,
    blocks_folder,
    fetch_blocks,
    list_files,
    local_copy,
    read_block,
)


class Shards:
    """An opened shard folder. Of one at a URL, all files but the tokens are copied to the cache.

    `manifest` is the content of manifest.json. `fingerprint` (hex SHA-256) identifies the tokens and the tokenizer; it
    does not depend on the path of the corpus.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], copy: Path | None = None) -> None:
        """`copy` of a folder at a URL."""
        self.folder = folder
        self.manifest = manifest
        self._files = copy or folder
        tokens = {key: manifest[key] for key in ("tokenizer", "dtype", "splits")}
        self.fingerprint = sha256_bytes(json.dumps(tokens, sort_keys=True).encode())
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.eot: int = manifest["tokenizer"]["eot"]

    @classmethod
    def open(cls, folder: Path) -> "Shards":
        """Open a folder after a fast check: the manifest's hash, all file sizes and the tokenizer's hash.

        Raises:
            DataError: not a shard folder, an unknown format, a missing or truncated file, or another tokenizer. At a
                URL also StorageError, and hashes of other files but the tokens are compared.
        """
        if isinstance(folder, RemotePath):
            sizes = {name: file.size for name, file in list_files(folder).items()}

            def check(copy: Path) -> None:
                cls(folder, read_manifest(copy), copy)._check(sizes.get, hash_lengths=True)

            copy = local_copy(folder, check, lambda name: not name.endswith((".bin", f".{LOSS_MASK}")))
            return cls(folder, read_manifest(copy), copy)
        shards = cls(folder, read_manifest(folder))
        shards._check(lambda name: _size(folder / name))
        return shards

    def _check(self, size_of: Callable[[str], int | None], *, hash_lengths: bool = False) -> None:
        """The check of `open`. `size_of` gives the bytes of a file; None: it is missing."""
        for split in SPLITS:
            for entry in self.entries(split):
                for ending, size in file_sizes(entry, self.manifest["dtype"]).items():
                    name = f"{entry['name']}.{ending}"
                    _check_size(self.folder / name, size_of(name), size)
                if hash_lengths:
                    self.document_lengths(entry)
        self._check_tokenizer()

    def verify(self, *splits: str) -> None:
        """The full check of the named splits (default: all): read everything that has a hash and compare it.

        Raises:
            DataError: a hash differs, or as `TokenShard`.
        """
        for split in splits or SPLITS:
            for entry in self.entries(split):
                self.document_lengths(entry)
            for shard in [*self.token_arrays(split), *self.loss_masks(split)]:
                if isinstance(shard, TokenShard):
                    shard.verify()
        self._check_tokenizer()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made these tokens."""
        return read_tokenizer(find_tokenizer(self._files))

    def entries(self, split: str) -> list[dict[str, Any]]:
        """The manifest entries of the shards of a split, in reading order."""
        return self.manifest["splits"][split]["shards"]

    def token_arrays(self, split: str) -> "list[TokenShard]":
        """The tokens of each shard [tokens], of the manifest's dtype."""
        dtype = self.manifest["dtype"]
        return [TokenShard(self.folder, entry, dtype, self.vocab_size) for entry in self.entries(split)]

    def loss_masks(self, split: str) -> "list[TokenShard | np.ndarray]":
        """Whether each token of each shard counts in the loss, 1 or 0 [tokens]."""
        return [
            TokenShard(self.folder, entry, "uint8", 2, LOSS_MASK)
            if f"{LOSS_MASK}_xxh3" in entry
            else np.broadcast_to(np.uint8(1), entry["tokens"])
            for entry in self.entries(split)
        ]

    def lengths(self, split: str) -> "list[np.ndarray]":
        """Tokens of each document of each shard, including its end-of-text id, int32 [documents].

        Raises:
            DataError: a damaged .idx file.
        """
        return [self.document_lengths(entry) for entry in self.entries(split)]

    def documents(self, split: str, first: int = 0) -> "Iterator[np.ndarray]":
        """The tokens [n] of each document from number `first`, without the end-of-text id.

        Raises:
            DataError: a damaged .idx file, or as `TokenShard`.
        """
        for document in self._by_document(split, self.token_arrays(split), first):
            yield document[:-1] if document[-1] == self.eot else document  # linked documents may have none

    def document_masks(self, split: str, first: int = 0) -> "Iterator[np.ndarray]":
        """Whether each token of each document from number `first` counts in the loss, 1 or 0, with its end-of-text id.

        Raises:
            DataError: as `documents`.
        """
        return self._by_document(split, self.loss_masks(split), first)

    def _by_document(
        self, split: str, arrays: "Sequence[TokenShard | np.ndarray]", first: int
    ) -> "Iterator[np.ndarray]":
        for entry, array in zip(self.entries(split), arrays, strict=True):
            lengths = self.document_lengths(entry)
            ends = np.cumsum(lengths, dtype=np.int64)
            for number in range(first, entry["documents"]):
                yield array[ends[number] - lengths[number] : ends[number]]
            first = max(first - entry["documents"], 0)

    def texts(self, split: str) -> "Iterator[str]":
        """The text of each document. Raises as `documents`."""
        tokenizer = self.tokenizer()
        return (tokenizer.decode(ids.tolist()) for ids in self.documents(split))

    def bad_rows(self) -> list[dict[str, str]]:
        """The first unreadable rows: `where` and `reason` of each."""
        return read_rows(self._files / BAD_ROWS)

    def document_lengths(self, entry: dict[str, Any]) -> "np.ndarray":
        """As `lengths`, of one shard, int32 [documents]."""
        return read_lengths(self._files / f"{entry['name']}.idx", entry)

    def _check_tokenizer(self) -> None:
        path = find_tokenizer(self._files)
        if sha256_file(path) != self.manifest["tokenizer"]["sha256"]:
            raise DataError(f"{path}: wrong tokenizer for the shards, its SHA-256 differs from the manifest; {AGAIN}")


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _check_size(path: Path, found: int | None, size: int) -> None:
    if found is None:
        raise DataError(f"{path}: missing; {AGAIN}")
    if found != size:
        raise DataError(f"{path}: damaged, {found} bytes instead of {size}; {AGAIN}")


class _OpenFile:
    """It is closed when no thread uses it any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(regular_file(path), os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


@lru_cache(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # of a corpus of more shards, those used last stay open
def _opened(shard: "TokenShard") -> _OpenFile:
    return _OpenFile(shard.path)


class TokenShard:
    """The tokens of one shard [tokens], or their loss mask, in a file or at a URL. Threads may share it. Slices are
    read-only copies: reading a map would end the process if the file is truncated.

    A block is checked once, before its first use: against its hash, and its ids against the vocabulary. Later changes
    of the block are not seen.
    """

    def __init__(self, folder: Path, entry: dict[str, Any], dtype: str, vocab_size: int, ending: str = "bin") -> None:
        """`entry` of the manifest. Raises DataError if the file is missing or has another size."""
        self.path, self._tokens = folder / f"{entry['name']}.{ending}", entry["tokens"]
        self._hashes: list[str] = entry[f"{ending}_xxh3"]
        self._dtype, self._vocab_size = np.dtype(dtype), vocab_size
        self._bytes = self._tokens if ending == LOSS_MASK else file_sizes(entry, dtype)["bin"]
        self._start = entry["linked"]["first_token"] * self._dtype.itemsize if "linked" in entry else 0
        self._block_tokens = HASH_BLOCK_BYTES // self._dtype.itemsize
        self._checked = bytearray(-(-self._tokens // self._block_tokens))
        self.is_remote = isinstance(self.path, RemotePath)
        """Whether it is at a URL."""
        self._cache = blocks_folder() if self.is_remote else ""
        self._check_size()

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, wanted: slice) -> "np.ndarray":
        """Raises DataError if the file is missing, truncated or cannot be read, or a block of these tokens is damaged;
        names the file and the byte range. Of a URL raises StorageError."""
        start, stop, _ = wanted.indices(self._tokens)
        self._check(start, stop)
        return self._read(start, stop)

    def verify(self) -> None:
        """Check all blocks. Raises DataError as a slice."""
        step = FETCHED_AT_ONCE * self._block_tokens
        for start in range(0, self._tokens, step):
            self._check(start, min(start + step, self._tokens))

    def missing(self, start: int, stop: int) -> list[RemoteBlock]:
        """The blocks of the tokens [start, stop) that are at a URL and not in the cache."""
        blocks = map(self._remote_block, range(*self._blocks_of(start, stop))) if self.is_remote else ()
        return [block for block in blocks if not os.path.exists(block.cached)]

    def _read(self, start: int, stop: int) -> "np.ndarray":
        """The tokens [start, stop), not checked."""
        begin, end = start * self._dtype.itemsize, stop * self._dtype.itemsize
        if not self.is_remote:
            return np.frombuffer(self._read_file(self._start + begin, end - begin), self._dtype)
        parts = []
        for first in range(begin - begin % HASH_BLOCK_BYTES, end, HASH_BLOCK_BYTES):
            block = self._remote_block(first // HASH_BLOCK_BYTES)
            parts.append(read_block(block, max(begin - first, 0), min(end - first, HASH_BLOCK_BYTES)))
        return np.frombuffer(b"".join(parts), self._dtype)

    def _read_file(self, place: int, size: int) -> bytes:
        try:
            file = _opened(self)
            data = os.pread(file.number, size, place)
            while len(data) < size:  # truncated, or more than one read returns
                _check_size(self.path, os.fstat(file.number).st_size, self._bytes)
                data += os.pread(file.number, size - len(data), place + len(data))
        except FileNotFoundError:
            raise DataError(f"{self.path}: missing; {AGAIN}") from None
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}; {AGAIN}") from None
        return data

    def _remote_block(self, number: int) -> RemoteBlock:
        assert isinstance(self.path, RemotePath)
        first, xxh3 = self._start + number * HASH_BLOCK_BYTES, self._hashes[number]
        stop = min(first + HASH_BLOCK_BYTES, self._start + self._tokens * self._dtype.itemsize)
        return RemoteBlock(self.path, first, stop, xxh3, f"{self._cache}/{xxh3[:2]}/{xxh3}")

    def _check_size(self) -> None:
        if not self.is_remote:
            _check_size(self.path, _size(self.path), self._bytes)

    def _blocks_of(self, start: int, stop: int) -> tuple[int, int]:
        """The first block of the tokens [start, stop), and the block after the last one."""
        return start // self._block_tokens, -(-stop // self._block_tokens)

    def _check(self, start: int, stop: int) -> None:
        """Check the blocks of the tokens [start, stop) that were not checked before."""
        first, end = self._blocks_of(start, stop)
        if self.is_remote and end - first > 1:
            fetch_blocks(self.missing(start, stop))
        while (block := self._checked.find(0, first, end)) >= 0:
            self._check_block(block)

    def _check_block(self, block: int) -> None:
        self._check_size()
        first = block * self._block_tokens
        stop = min(first + self._block_tokens, self._tokens)
        tokens = self._read(first, stop)
        start = self._start + first * tokens.itemsize
        if xxhash.xxh3_128_hexdigest(tokens.data) != self._hashes[block]:
            if not self.is_remote:
                raise DataError(
                    f"{self.path}: damaged between bytes {start:,} and {start + tokens.nbytes:,}, their hash differs "
                    f"from the manifest; {AGAIN}"
                )
            Path(self._remote_block(block).cached).unlink(missing_ok=True)  # a damaged copy; a new one is hashed
            tokens = self._read(first, stop)
        unsigned = tokens.view(f"u{tokens.itemsize}")
        if unsigned.max() >= self._vocab_size:
            place = int(unsigned.argmax())
            raise DataError(
                f"{self.path}: token id {tokens[place]} at byte {start + place * tokens.itemsize:,} is not in the "
                f"vocabulary of {self._vocab_size:,}; {AGAIN}"
            )
        self._checked[block] = 1


class Concatenation:
    """Concatenated arrays or shards [n], read by segments."""

    def __init__(self, arrays: "Sequence[np.ndarray | TokenShard]") -> None:
        self._arrays = arrays
        self._remote = any(isinstance(array, TokenShard) and array.is_remote for array in arrays)
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start_S: "np.ndarray", length_S: "np.ndarray", dtype: "type[np.generic]") -> "np.ndarray":
        """The elements [start, start + length) of each segment, concatenated, as `dtype`. No segment may be empty."""
        number_S = np.searchsorted(self._ends, start_S, "right")
        left_S = self._ends[number_S] - start_S
        ranges = []
        for number, left, length in zip(number_S.tolist(), left_S.tolist(), length_S.tolist(), strict=True):
            array = self._arrays[number]
            ranges.append((array, len(array) - left, min(len(array), len(array) - left + length)))
            while length > left:  # continues in the next array
                length, number = length - left, number + 1
                left = len(self._arrays[number])
                ranges.append((self._arrays[number], 0, min(length, left)))
        if self._remote:
            missing = [array.missing(start, stop) for array, start, stop in ranges if isinstance(array, TokenShard)]
            fetch_blocks([*dict.fromkeys(chain(*missing))])  # many at once, and each once
        out = np.empty(length_S.sum(), dtype=dtype)
        views = [array[start:stop] for array, start, stop in ranges]
        return np.concatenate(views, out=out, casting="unsafe") if views else out


def length_histogram(lengths: "np.ndarray") -> list[tuple[int, int, int]]:
    """The shortest and the longest length of each bucket by powers of 2, and its number of documents. `lengths`
    [documents] ≥ 1, including end-of-text ids."""
    exponents = np.frexp(lengths)[1] - 1  # 2^e ≤ length < 2^(e + 1), exactly
    counts = np.bincount(exponents)
    return [(1 << e, (2 << e) - 1, int(counts[e])) for e in range(int(exponents.min()), len(counts))]
