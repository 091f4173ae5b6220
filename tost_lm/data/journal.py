"""How far a build of shards is on disk, so that a killed one goes on from there."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from tost_lm.data.encoding import Encoded
from tost_lm.data.shard_format import SPLITS
from tost_lm.data.shard_writer import FRESH, SplitWriter
from tost_lm.data.sources import Block, Position
from tost_lm.files import write_whole

JOURNAL = "journal.json"
BAD_ROWS_KEPT = 100


class Journal:
    """What to go on from, and the counts of rows so far."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        """A build of `identity` that begins."""
        self._path = folder / JOURNAL
        self.identity = identity
        self.corpus_rows: int | None = None
        """Counted before, where the split needs it."""
        self.position: Position | None = None
        """Where the corpus goes on; None: at its beginning."""
        self.rows = {"read": 0, "bad": 0, "left_out": 0}
        self.splits: dict[str, Any] = dict.fromkeys(SPLITS, FRESH)
        """What each split's writer committed."""
        self._bad: list[list[Any]] = []

    @classmethod
    def read(cls, folder: Path, identity: dict[str, Any]) -> "Journal | None":
        """The journal in a folder; None if there is none of a build of this identity."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads((folder / JOURNAL).read_bytes())
            if content["identity"] == identity:
                journal = cls(folder, identity)
                journal.corpus_rows, journal.position = content["corpus_rows"], Position(*content["position"])
                journal.rows, journal.splits, journal._bad = content["rows"], content["splits"], content["bad"]
                return journal
        return None

    def count(self, block: Block, encoded: Encoded) -> None:
        """Take a block's rows into the counts, and its bad ones into the sample."""
        self.position = block.end
        self.rows["read"] += block.rows
        self.rows["bad"] += len(encoded.bad)
        self.rows["left_out"] += block.rows - encoded.documents - len(encoded.bad)
        if encoded.bad:
            # Those of the smallest hashes are a uniform sample, whatever the number of rows.
            hashed = [[xxhash.xxh3_64_hexdigest(str(row.row).encode()), *row] for row in encoded.bad]
            self._bad = sorted([*self._bad, *hashed])[:BAD_ROWS_KEPT]

    def bad_rows(self) -> list[dict[str, Any]]:
        """The sample, in the order of the corpus."""
        ordered = sorted(self._bad, key=lambda bad: bad[1])
        return [{"where": where, "reason": reason} for _, _, where, reason in ordered]

    def commit(self, writers: dict[str, SplitWriter]) -> None:
        """Bring what was written to disk, then say so."""
        self.splits = {split: writer.commit() for split, writer in writers.items()}
        content = {
            "identity": self.identity,
            "corpus_rows": self.corpus_rows,
            "position": self.position,
            "rows": self.rows,
            "splits": self.splits,
            "bad": self._bad,
        }
        write_whole(self._path, json.dumps(content))
