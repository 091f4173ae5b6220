"""Blocks of a corpus: what the reading process hands to the processes that parse it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

BLOCK_BYTES = 1 << 20
ROW_LIMIT = 1 << 30
"""Bytes of the longest row. Several copies of a row are in memory at once."""


class Position(NamedTuple):
    """Where a block begins, as plain numbers that JSON can store."""

    file: int
    """Index of the file in the order of the corpus."""
    offset: int
    """Decompressed bytes, table rows or JSON array items of the file before the block."""
    row: int
    """Rows of the corpus before the block."""
    line: int
    """Lines, rows or items of the file before the block."""


@dataclass(frozen=True)
class Block:
    """Some rows of a corpus, unparsed."""

    kind: Literal["lines", "arrow", "text"]
    """JSON lines; an Arrow IPC stream of one column; plain text (one document a file or a line)."""
    payload: bytes
    where: str
    """The file, hub dataset or other source, for messages."""
    first_row: int
    """Number of the first row in the corpus."""
    rows: int
    """Number of rows; blank lines do not count."""
    first_line: int
    """Number of the first line, row or item in `where`, for messages."""
    end: Position
    """Where the next block begins."""
    fraction_read: float | None
    """Fraction of the corpus read after this block, 0 to 1; None: the size of the corpus is unknown."""
    unit: Literal["line", "row", "item"] = "line"
    """What `first_line` counts: lines from 1, rows and items from 0."""


class SourceBlock(NamedTuple):
    """Some rows of one source. Its place in the corpus is added later."""

    payload: bytes
    rows: int
    lines: int
    """Number of lines, rows or items of the source."""
    offset: int
    """Where the next block begins, as `Position.offset`."""
    consumed: int
    """Amount read so far: bytes of a file on disk, rows of other sources."""


def blocks_of_rows(
    rows: Iterable[bytes], skip: int, block_bytes: int, consumed: Callable[[int], int]
) -> Iterator[SourceBlock]:
    """Blocks of JSON lines from single rows, without the first `skip` rows.

    `consumed` maps a number of rows to the amount read.
    """
    lines, size, number = [], 0, 0
    for number, row in enumerate(rows, start=1):
        if number <= skip:
            continue
        lines.append(row)
        size += len(row) + 1
        if size >= block_bytes:
            yield SourceBlock(b"\n".join(lines), len(lines), len(lines), number, consumed(number))
            lines, size = [], 0
    if lines:
        yield SourceBlock(b"\n".join(lines), len(lines), len(lines), number, consumed(number))
