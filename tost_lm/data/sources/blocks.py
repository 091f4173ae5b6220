"""Blocks of a corpus: what the reading process hands to the worker processes, and their parsing into documents.

Messages about a corpus are one line each that is safe for a terminal.
"""

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tost_lm.data.settings import CorpusConfig
from tost_lm.data.sources.chats import MESSAGES, PAIR, TOOLS, Chats, Parts, UnusableError, completed
from tost_lm.errors import DataError, listed


def too_long(what: str) -> DataError:
    """The error for a row of more than ROW_LIMIT bytes."""
    return DataError(f"{what} is longer than {ROW_LIMIT >> 30} GiB; divide it into shorter rows")


def too_many_bad(where: str, reason: str, bad: int, rows: int, more: str = "") -> DataError:
    """The error for a corpus with more bad rows than allowed; `where` and `reason` describe one of them."""
    return DataError(
        f"{where}: {reason}; {bad} of {rows} rows cannot be read{more}: correct them, or raise corpus.max_bad_fraction"
    )


def corpus_changed(corpus: CorpusConfig) -> DataError:
    """The error for a corpus whose fingerprint changed while it was read."""
    return DataError(f"corpus.source {corpus.source}: changed while it was read; run the same command again")


ROW = "row"
"""Name of a column that has whole rows as JSON."""
BLOCK_BYTES = 1 << 20
ROW_LIMIT = 1 << 30
"""Bytes of the longest row. Several copies of a row are in memory at once."""


class Position(NamedTuple):
    """Where a block begins, as plain numbers that JSON can store."""

    file: int
    """Index of the file in the order of the corpus."""
    offset: int
    """Decompressed bytes or table rows of the file before the block."""
    row: int
    """Rows of the corpus before the block."""
    line: int
    """Lines or rows of the file before the block."""


@dataclass(frozen=True)
class CorpusBlock:
    """Some rows of a corpus, unparsed."""

    kind: Literal["lines", "arrow", "text"]
    """JSON lines; an Arrow IPC stream of one column; plain text (one document a file or a line)."""
    payload: bytes
    where: str
    """The file or other source, for messages."""
    first_row: int
    """Number of the first row in the corpus."""
    rows: int
    """Number of rows; blank lines do not count."""
    first_line: int
    """Number of the first line or row in `where`, for messages."""
    end: Position
    """Where the next block begins."""
    fraction_read: float
    """Fraction of the corpus read after this block, 0 to 1."""

    @property
    def unit(self) -> Literal["line", "row"]:
        """The unit of `first_line`: lines from 1, rows of a table from 0."""
        return "row" if self.kind == "arrow" else "line"


class SourceBlock(NamedTuple):
    """Some rows of one source. Its place in the corpus is added later."""

    payload: bytes
    rows: int
    lines: int
    """Number of lines or rows of the source."""
    offset: int
    """Where the next block begins, as `Position.offset`."""
    consumed: int
    """Amount read so far: bytes of a file on disk, rows of other sources."""


class Source(NamedTuple):
    """One file of a corpus, or the embedded corpus."""

    kind: Literal["lines", "arrow", "text"]
    blocks: Callable[[int, int], Iterator[SourceBlock]]
    """From an offset and a block size in bytes to the blocks."""
    where: str
    """The name in messages."""
    size: int
    """In the unit of `SourceBlock.consumed`."""


class CorpusFormat(NamedTuple):
    """A format of corpus files. Its rows become JSON lines, one column of a table or plain text."""

    endings: tuple[str, ...]
    """In lower case."""
    kind: Literal["lines", "arrow", "text"]
    blocks: Callable[[Path, int, CorpusConfig, int, int], Iterator[SourceBlock]]
    """From a file, its size in bytes, the settings, an offset and a block size in bytes to the blocks."""
    may_be_compressed: bool = False
    """Whether `text.COMPRESSIONS` may follow the ending."""


class Document(NamedTuple):
    """A row of a corpus."""

    row: int
    """Its number."""
    text: str
    """All of its text."""
    parts: Parts = ()
    """Of a row with prompts and answers; empty: every token counts."""
    is_chat: bool = False
    """Whether a chat template wrote the text: names of special tokens in it are these tokens."""


class BadRow(NamedTuple):
    """A row without a usable text."""

    row: int
    where: str
    """For example `FILE, line 7` or `FILE, row 7` of a table."""
    reason: str


NO_CHATS = Chats(None)


def parse(block: CorpusBlock, corpus: CorpusConfig, chats: Chats = NO_CHATS) -> Iterator[Document | BadRow]:
    """The normalized documents of a block and its bad rows, in order, without too short and too long texts.

    Args:
        chats: renders the messages of a row.
    """
    form = corpus.normalization
    normalized = partial(unicodedata.normalize, form) if form != "none" else str
    for row, (number, raw) in enumerate(_rows(block, corpus), start=block.first_row):
        try:
            content = _content(block, raw, corpus.text_field)
            if isinstance(content, str):
                document = Document(row, normalized(content))
            else:
                document = _divided(row, content, corpus.text_field, chats, normalized)
        except UnusableError as problem:
            whole = block.kind == "text" and corpus.text_documents == "file"
            yield BadRow(row, block.where if whole else f"{block.where}, {block.unit} {number}", str(problem))
            continue
        size = len(document.text)
        if size >= corpus.min_characters and (corpus.max_characters is None or size <= corpus.max_characters):
            yield document


def _divided(
    row: int, content: Mapping[str, Any], text_field: str, chats: Chats, normalized: Callable[[str], str]
) -> Document:
    """The document of a row with messages, or with a prompt and its completion."""
    field = next((name for name in (text_field, MESSAGES) if name in content), None)
    found = chats.parts(content[field], content.get(TOOLS)) if field else completed(content)
    _check_unicode("".join(part.text for part in found), field or PAIR[0])
    parts = tuple(part._replace(text=normalized(part.text)) for part in found)
    return Document(row, "".join(part.text for part in parts), parts, is_chat=field is not None)


def _rows(block: CorpusBlock, corpus: CorpusConfig) -> Iterator[tuple[int, Any]]:
    """Each row, after its number in the file."""
    if block.kind == "arrow":
        yield from enumerate(_column(block.payload), start=block.first_line)
    elif block.kind == "text" and corpus.text_documents == "file":
        yield block.first_line, block.payload
    else:
        for number, line in enumerate(block.payload.split(b"\n"), start=block.first_line):
            if line.strip():
                yield number, line.removesuffix(b"\r")


def _column(payload: bytes) -> Iterator[str | bytes | dict[str, Any] | None]:
    """Texts of an Arrow stream, bytes if a batch is not UTF-8; or its rows, from JSON."""
    import pyarrow

    for batch in pyarrow.ipc.open_stream(payload):
        try:
            values = batch.column(0).to_pylist()
        except UnicodeDecodeError:
            column = batch.column(0)
            values = column.cast(pyarrow.large_binary()).to_pylist()
        yield from map(json.loads, values) if batch.schema.names == [ROW] else values


def _content(block: CorpusBlock, raw: Any, text_field: str) -> str | dict[str, Any]:
    """The text of a row, from bytes of a line or file or the value of a column; or the row, if it has none."""
    if raw is None:
        raise UnusableError(f"field {text_field!r} is null")
    if isinstance(raw, (str, dict)):
        return raw
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UnusableError(f"byte {error.start} is not UTF-8 (convert the text, for example with iconv)") from None
    return _field(text, text_field) if block.kind == "lines" else text


def _field(line: str, text_field: str) -> str | dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UnusableError(f"not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"JSON that cannot be read: {error}") from None
    if not isinstance(row, dict):
        raise UnusableError(f"not a JSON object but {_kind(row)}")
    if text_field not in row:
        if divided_fields(row):
            return row
        if len(lacking := {*PAIR} - {*row}) == 1:
            raise UnusableError(f"no field {lacking.pop()!r}; add it, or set corpus.text_field: {listed(row)}")
        raise UnusableError(f"no field {text_field!r}; set corpus.text_field to one of the fields there: {listed(row)}")
    text = row[text_field]
    if isinstance(text, list) and text and isinstance(text[0], dict):
        return row
    if not isinstance(text, str):
        raise UnusableError(f"field {text_field!r} is {_kind(text)}, not a string")
    _check_unicode(text, text_field)
    return text


def divided_fields(names: Iterable[str]) -> tuple[str, ...]:
    """The fields of a row without a text that has messages, or a prompt and its completion; empty: neither."""
    names = {*names}
    return next((fields for fields in ((MESSAGES,), PAIR) if names.issuperset(fields)), ())


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableError(f"character {error.start} of field {field!r} is a lone surrogate") from None


def _kind(value: Any) -> str:
    """JSON's name of a value's type."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
