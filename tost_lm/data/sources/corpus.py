"""A corpus as a whole: its blocks in order, its fingerprint, its rows."""

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from tost_lm.data.config import CorpusConfig
from tost_lm.data.sources.arrays import array_pieces, is_array
from tost_lm.data.sources.blocks import BLOCK_BYTES, Block, Piece, Position, lines_of_rows
from tost_lm.data.sources.embedded import embedded_texts
from tost_lm.data.sources.files import CorpusFile, corpus_files, format_of
from tost_lm.data.sources.hub import hub_fingerprint, hub_pieces, hub_rows, known_rows
from tost_lm.data.sources.lines import line_pieces, whole_text
from tost_lm.data.sources.messages import printable
from tost_lm.data.sources.tables import arrow_pieces, arrow_rows, parquet_pieces, parquet_rows
from tost_lm.errors import DataError

T = TypeVar("T")
DECIDES_DOCUMENTS = (
    "text_field", "text_documents", "hub_subset", "hub_revision", "hub_split", "normalization", "min_characters",
    "max_characters",
)  # fmt: skip


class Part(NamedTuple):
    """One file of a corpus; the embedded corpus and a hub dataset are one part each."""

    where: str
    size: int | None
    """In the measure of `Piece.consumed`; None: unknown."""
    kind: Literal["lines", "arrow", "text"]
    unit: Literal["line", "row", "item"]
    pieces: Callable[[int, int], Iterator[Piece]]
    """From an offset on, of so many bytes."""
    rows: Callable[[], int] | None = None
    """Their number, where there is a shorter way than reading all pieces."""


def read_blocks(corpus: CorpusConfig, start: Position | None = None, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Blocks of about `block_bytes`, from the beginning or from the end of an earlier block, always the same ones.

    Raises:
        DataError: the source is missing, holds no rows, or a file cannot be read; raised while iterating.
    """
    parts = _parts(corpus)
    first, offset, row, line = start or Position(0, 0, 0, 0)
    before, total = (sum(part.size or 0 for part in some) for some in (parts[:first], parts))
    known = all(part.size is not None for part in parts)
    for file, part in enumerate(parts[first:], start=first):
        pieces = _read(part, offset, block_bytes)
        piece = next(pieces, None)
        while piece is not None:
            following = next(pieces, None)
            first_row, first_line = row, line + (part.unit == "line")
            row, line = row + piece.rows, line + piece.lines
            end, consumed = Position(file, piece.offset, row, line), piece.consumed
            if following is None:
                end, consumed = Position(file + 1, 0, row, 0), part.size or 0
            share = min(1.0, (before + consumed) / max(1, total)) if known else None
            yield Block(part.kind, piece.payload, part.where, first_row, piece.rows, first_line, end, share, part.unit)
            piece = following
        offset, line, before = 0, 0, before + (part.size or 0)
    if not row:
        raise DataError(f"corpus.source {corpus.source}: holds no rows; point it at documents")


def count_rows(corpus: CorpusConfig) -> int:
    """How many rows a corpus has, bad and empty ones among them; texts are not parsed.

    Raises:
        DataError: the source is missing or a file cannot be read.
    """
    rows = 0
    for part in _parts(corpus):
        if part.rows:
            rows += _guarded(part.where, part.rows)
        else:
            rows += sum(piece.rows for piece in _read(part, 0, BLOCK_BYTES))
    return rows


def fingerprint(corpus: CorpusConfig) -> str:
    """Hex SHA-256 that changes when the documents of a corpus do, whichever side of the split they lie on.

    `embedded` is hashed whole; files by relative name, size and time of change; hub datasets by what the datasets
    library identifies a revision with.

    Raises:
        DataError: the source is missing.
    """
    settings = {name: getattr(corpus, name) for name in DECIDES_DOCUMENTS}
    if corpus.source == "embedded":
        parts = list(embedded_texts())
    elif corpus.source.startswith("hub:"):
        parts = [(corpus.source, hub_fingerprint(corpus))]
    else:
        parts = [(file.name, file.size, file.mtime_ns) for file in corpus_files(corpus.source)]
    digest = hashlib.sha256()
    for part in (settings, *parts):
        digest.update(json.dumps(part).encode())
    return digest.hexdigest()


def _parts(corpus: CorpusConfig) -> list[Part]:
    if corpus.source == "embedded":
        rows = [json.dumps({corpus.text_field: text}).encode() for text in embedded_texts()]
        return [Part("embedded", len(rows), "lines", "row", partial(_embedded_pieces, rows), lambda: len(rows))]
    if corpus.source.startswith("hub:"):
        pieces = partial(hub_pieces, corpus)
        return [Part(corpus.source, known_rows(corpus), "arrow", "row", pieces, partial(hub_rows, corpus))]
    return [_file_part(file, corpus) for file in corpus_files(corpus.source)]


def _embedded_pieces(rows: list[bytes], offset: int, block_bytes: int) -> Iterator[Piece]:
    return lines_of_rows(rows, offset, block_bytes, lambda row: row)


def _file_part(file: CorpusFile, corpus: CorpusConfig) -> Part:
    where, path, size = printable(str(file.path)), file.path, file.size
    match format_of(path):
        case ".txt" if corpus.text_documents == "file":
            return Part(where, size, "text", "line", partial(whole_text, path), lambda: 1)
        case ".txt":
            return Part(where, size, "text", "line", partial(line_pieces, path))
        case ".parquet":
            pieces = partial(parquet_pieces, path, size, corpus.text_field)
            return Part(where, size, "arrow", "row", pieces, partial(parquet_rows, path))
        case ".arrow":
            pieces = partial(arrow_pieces, path, size, corpus.text_field)
            return Part(where, size, "arrow", "row", pieces, partial(arrow_rows, path))
        case ".json" if _guarded(where, lambda: is_array(path)):
            return Part(where, size, "lines", "item", partial(array_pieces, path))
    return Part(where, size, "lines", "line", partial(line_pieces, path))


def _read(part: Part, offset: int, block_bytes: int) -> Iterator[Piece]:
    pieces = part.pieces(offset, block_bytes)
    while (piece := _guarded(part.where, lambda: next(pieces, None))) is not None:
        yield piece


def _guarded(where: str, call: Callable[[], T]) -> T:
    """What `call` returns; what goes wrong with the file becomes one line."""
    try:
        return call()
    except ImportError as error:
        raise DataError(f"{where}: cannot be read without the package {error.name}: pip install {error.name}") from None
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors are these too
        lines = str(error).strip().splitlines()
        problem = lines[0] if lines else type(error).__name__
        raise DataError(f"{where}: cannot be read: {problem}; mend it, fetch it again or remove it") from None
