"""Parquet and Arrow files: the column of texts alone, cut into pieces by its bytes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tost_lm.data.sources.blocks import ROW_LIMIT, Piece
from tost_lm.data.sources.messages import listed, too_long
from tost_lm.errors import DataError

ROW_OVERHEAD = 16
"""Bytes that a row counts for beyond its text, so that empty ones make no endless block."""


def parquet_pieces(path: Path, size: int, text_field: str, offset: int, block_bytes: int) -> Iterator[Piece]:
    """Pieces of a Parquet file from row `offset`; row groups before it are not read."""
    from pyarrow import parquet

    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        check_column(str(path), file.schema_arrow, text_field)
        groups = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
        first = skipped = 0
        while first < len(groups) and skipped + groups[first] <= offset:
            skipped += groups[first]
            first += 1
        # few rows at a time: what they take is known only once they are read, and columns have no common length
        batches = file.iter_batches(256, row_groups=range(first, len(groups)), columns=[text_field], use_threads=False)
        columns = _from_row(offset - skipped, (batch.column(0) for batch in batches))
        yield from cut(str(path), columns, offset, block_bytes, lambda row: size * row // file.metadata.num_rows)


def parquet_rows(path: Path) -> int:
    """Rows of a Parquet file, by its metadata."""
    from pyarrow import parquet

    return parquet.read_metadata(path).num_rows


def arrow_pieces(path: Path, size: int, text_field: str, offset: int, block_bytes: int) -> Iterator[Piece]:
    """Pieces of an Arrow file or stream from row `offset`."""
    total = arrow_rows(path)
    with _arrow_batches(path) as (schema, batches):
        check_column(str(path), schema, text_field)
        columns = _from_row(offset, (batch.column(text_field) for batch in batches))
        yield from cut(str(path), columns, offset, block_bytes, lambda row: size * row // total)


def arrow_rows(path: Path) -> int:
    """Rows of an Arrow file or stream; texts are not read unless they are compressed."""
    with _arrow_batches(path) as (_, batches):
        return sum(batch.num_rows for batch in batches)


def check_column(where: str, schema: Any, text_field: str) -> None:
    """Raise DataError unless a table has one column of that name and it holds strings."""
    from pyarrow import types

    if schema.get_field_index(text_field) < 0:
        raise DataError(
            f"{where}: no column {text_field!r}; set corpus.text_field to one of those there: {listed(schema.names)}"
        )
    kind = schema.field(text_field).type
    text = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)):
        raise DataError(f"{where}: column {text_field!r} is {kind}, not string; set corpus.text_field to one that is")


def cut(
    where: str, columns: Iterable[Any], row: int, block_bytes: int, consumed: Callable[[int], int]
) -> Iterator[Piece]:
    """Pieces of texts that come as Arrow arrays, the first being row `row`.

    A piece ends with the text that brings it to `block_bytes`, however the arrays divide the rows, so that pieces from
    any piece's end on are the same. `consumed` says for a row how much has been read before it.
    """
    import numpy as np

    parts, size, rows = [], 0, 0
    for column in columns:
        lengths = _lengths(column)
        if (lengths > ROW_LIMIT).any():
            raise too_long(f"{where}: a text", ROW_LIMIT)
        ends = np.cumsum(lengths + ROW_OVERHEAD)
        begin = before = 0
        while begin < len(column):
            stop = int(np.searchsorted(ends, before + block_bytes - size)) + 1
            parts.append(_plain(column[begin:stop]))
            taken = len(parts[-1])
            row, rows, begin = row + taken, rows + taken, begin + taken
            size += int(ends[begin - 1]) - before
            before = int(ends[begin - 1])
            if size >= block_bytes:
                yield Piece(_stream_bytes(parts), rows, rows, row, consumed(row))
                parts, size, rows = [], 0, 0
    if parts:
        yield Piece(_stream_bytes(parts), rows, rows, row, consumed(row))


@contextmanager
def _arrow_batches(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Schema and record batches of Arrow's file format, which is Feather's, or of the stream that datasets writes.

    All columns: naming some makes pyarrow copy a batch that it otherwise leaves in the mapped file.
    """
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        yield reader.schema, map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)


def _from_row(skip: int, columns: Iterable[Any]) -> Iterator[Any]:
    for column in columns:
        if len(column) > skip:
            yield column[skip:]
        skip = max(0, skip - len(column))


def _lengths(column: Any) -> Any:
    """Bytes of each text, int64; of null: 0."""
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_dictionary(column.type):
        lengths = pyarrow.array(_lengths(column.dictionary)).take(column.indices)
    else:
        lengths = compute.call_function("binary_length", [_plain(column)]).cast(pyarrow.int64())
    return compute.fill_null(lengths, 0).to_numpy(zero_copy_only=False)


def _plain(column: Any) -> Any:
    """Dictionaries and views as strings of their own."""
    import pyarrow

    plain = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
    return column if plain else column.cast(pyarrow.large_string())


def _stream_bytes(parts: list[Any]) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    batch = pyarrow.record_batch([pyarrow.concat_arrays(parts)], names=["text"])
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()
