"""The progress of a build of shards on disk, from which a killed build resumes."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from tost_lm.data.encoding import Encoded
from tost_lm.data.shard_format import SPLITS
from tost_lm.data.shard_writer import FRESH, SplitWriter
from tost_lm.data.sources import Block, Position
from tost_lm.files import write_atomically

JOURNAL = "journal.json"
BAD_ROWS_KEPT = 100


class Journal:
    """The position to resume from, and the counts of rows so far."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        """A journal of a new build with this `identity`."""
        self._path = folder / JOURNAL
        self.identity = identity
        self.corpus_rows: int | None = None
        """Counted before the build, if the split needs it."""
        self.position: Position | None = None
        """Where to resume reading the corpus; None: at its beginning."""
        self.rows = {"read": 0, "bad": 0, "left_out": 0}
        self.splits: dict[str, Any] = dict.fromkeys(SPLITS, FRESH)
        """The last commit of each split's writer."""
        self._bad: list[list[Any]] = []

    @classmethod
    def read(cls, folder: Path, identity: dict[str, Any]) -> "Journal | None":
        """The journal in a folder; None if it is missing, damaged or of another identity."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads((folder / JOURNAL).read_bytes())
            if content["identity"] == identity:
                journal = cls(folder, identity)
                journal.corpus_rows, journal.position = content["corpus_rows"], Position(*content["position"])
                journal.rows, journal.splits, journal._bad = content["rows"], content["splits"], content["bad"]
                return journal
        return None

    def count(self, block: Block, encoded: Encoded) -> None:
        """Add the rows of a block to the counts, and its bad rows to the sample."""
        self.position = block.end
        self.rows["read"] += block.rows
        self.rows["bad"] += len(encoded.bad)
        self.rows["left_out"] += block.rows - encoded.documents - len(encoded.bad)
        if encoded.bad:
            # The rows with the smallest hashes are a uniform sample of any number of rows.
            hashed = [[xxhash.xxh3_64_hexdigest(str(row.row).encode()), *row] for row in encoded.bad]
            self._bad = sorted([*self._bad, *hashed])[:BAD_ROWS_KEPT]

    def bad_rows(self) -> list[dict[str, Any]]:
        """The sample of bad rows, in the order of the corpus."""
        ordered = sorted(self._bad, key=lambda bad: bad[1])
        return [{"where": where, "reason": reason} for _, _, where, reason in ordered]

    def commit(self, writers: dict[str, SplitWriter]) -> None:
        """Flush the shards to disk, then record their sizes."""
        self.splits = {split: writer.commit() for split, writer in writers.items()}
        content = {
            "identity": self.identity,
            "corpus_rows": self.corpus_rows,
            "position": self.position,
            "rows": self.rows,
            "splits": self.splits,
            "bad": self._bad,
        }
        write_atomically(self._path, json.dumps(content))
