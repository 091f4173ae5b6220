"""Writes the shards of one split so that a killed build resumes from its last commit with the same bytes.

Documents are appended in the order of the corpus. A commit flushes the files and returns their sizes; to resume, the
files are truncated to these sizes. megatron-core's builder cannot reopen a shard, so this module writes the index; a
test reads it with megatron-core.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import xxhash

from tost_lm.data.shard_format import block_hashes, index_bytes
from tost_lm.errors import DataError

if TYPE_CHECKING:
    import numpy as np

FRESH: dict[str, Any] = {"closed": [], "open": None}
LENGTHS = "lengths"
"""Ending of the file with the document lengths of an open shard, int32."""


class SplitWriter:
    """Writes the shards of one split to `folder`. The document that fills a shard closes it."""

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int, committed: dict[str, Any]) -> None:
        """`committed` is a result of `commit`, or FRESH for a new split.

        Raises:
            DataError: the files are shorter than the commit records.
        """
        import numpy as np

        self._folder = folder
        self._split = split
        self._dtype = np.dtype(dtype)
        self._shard_tokens = shard_tokens
        self.closed: list[dict[str, Any]] = list(committed["closed"])
        self._open: dict[str, Any] | None = None
        self._files: dict[str, IO[bytes]] = {}
        if shard := committed["open"]:
            self._open = dict(shard)
            extents = {"bin": shard["tokens"] * self._dtype.itemsize, LENGTHS: shard["documents"] * 4}
            for ending, extent in extents.items():
                path = self._path(shard["name"], ending)
                if not path.is_file() or path.stat().st_size < extent:
                    raise DataError(f"{path}: shorter than at the last commit; delete {folder} and start again")
                os.truncate(path, extent)
                self._files[ending] = path.open("ab")

    def add(self, tokens: "np.ndarray", lengths: "np.ndarray", text_bytes: "np.ndarray") -> None:
        """Append documents: tokens [Σ lengths]; tokens and bytes of text of each document [documents]."""
        import numpy as np

        while len(lengths):
            shard = self._open or self._begin_shard()
            ends = np.cumsum(lengths, dtype=np.int64)
            room = self._shard_tokens - shard["tokens"]
            count = min(int(np.searchsorted(ends, room)) + 1, len(lengths))  # up to the document that fills the shard
            self._files["bin"].write(tokens[: ends[count - 1]].astype(self._dtype, copy=False).tobytes())
            self._files[LENGTHS].write(lengths[:count].astype(np.int32).tobytes())
            shard["documents"] += count
            shard["tokens"] += int(ends[count - 1])
            shard["bytes"] += int(text_bytes[:count].sum())
            tokens, lengths, text_bytes = tokens[ends[count - 1] :], lengths[count:], text_bytes[count:]
            if shard["tokens"] >= self._shard_tokens:
                self._close_shard()

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
        import numpy as np

        assert self._open is not None
        self.commit()
        for file in self._files.values():
            file.close()
        shard, self._open, self._files = self._open, None, {}
        lengths = np.fromfile(self._path(shard["name"], LENGTHS), np.int32)
        index = index_bytes(lengths, self._dtype.name)
        with self._path(shard["name"], "idx").open("wb") as file:
            file.write(index)
            file.flush()
            os.fsync(file.fileno())
        hashes = list(block_hashes(self._path(shard["name"], "bin")))
        self.closed.append({**shard, "idx_xxh3": xxhash.xxh3_128_hexdigest(index), "bin_xxh3": hashes})

    def _path(self, name: str, ending: str) -> Path:
        return self._folder / f"{name}.{ending}"
