"""What travels from the process that reads a corpus to those that parse it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

BLOCK_BYTES = 1 << 20
ROW_LIMIT = 1 << 30
"""Bytes of the longest row: one is held in memory several times over."""


class Position(NamedTuple):
    """Where a block begins. Plain numbers, which JSON keeps."""

    file: int
    """Index of the file in the order of the corpus."""
    offset: int
    """Within that file: decompressed bytes before it; rows of a table, items of a JSON array."""
    row: int
    """Rows of the corpus before it."""
    line: int
    """Of that file: lines, rows or items before it."""


@dataclass(frozen=True)
class Block:
    """Some rows of a corpus, unparsed."""

    kind: Literal["lines", "arrow", "text"]
    """JSON lines; an Arrow IPC stream of one column; plain text: one document, or one a line."""
    payload: bytes
    where: str
    """The file, hub dataset or other source, for messages."""
    first_row: int
    """Number of the first row in the corpus."""
    rows: int
    """How many rows; blank lines are none."""
    first_line: int
    """Number of the first line, row or item within `where`, for messages."""
    end: Position
    """Where the next block begins."""
    share_read: float | None
    """Share of the corpus read with this block, 0 to 1; None: its size is unknown."""
    unit: Literal["line", "row", "item"] = "line"
    """What `first_line` counts: lines from 1, rows and items from 0."""


class Piece(NamedTuple):
    """Some rows of one file: a block that does not know where in the corpus it lies."""

    payload: bytes
    rows: int
    lines: int
    """How many lines, rows or items of the file it takes up."""
    offset: int
    """Where the next piece begins, as `Position.offset`."""
    consumed: int
    """How much has been read: bytes of a file on disk, rows of other sources."""


def lines_of_rows(
    rows: Iterable[bytes], skip: int, block_bytes: int, consumed: Callable[[int], int]
) -> Iterator[Piece]:
    """Pieces of JSON lines from rows that are at hand one by one; the first `skip` of them are left out.

    `consumed` says how much has been read after so many rows.
    """
    lines, size, number = [], 0, 0
    for number, row in enumerate(rows, start=1):
        if number <= skip:
            continue
        lines.append(row)
        size += len(row) + 1
        if size >= block_bytes:
            yield Piece(b"\n".join(lines), len(lines), len(lines), number, consumed(number))
            lines, size = [], 0
    if lines:
        yield Piece(b"\n".join(lines), len(lines), len(lines), number, consumed(number))
