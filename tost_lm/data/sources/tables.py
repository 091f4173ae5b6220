"""Parquet files. The column of texts, or of rows as JSON, is cut into blocks by its bytes."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tost_lm.data.settings import CorpusConfig
from tost_lm.data.sources.blocks import ROW, ROW_LIMIT, CorpusFormat, SourceBlock, divided_fields, too_long
from tost_lm.data.sources.chats import TOOLS
from tost_lm.errors import DataError, listed
from tost_lm.remote import RemotePath, RemoteReader

PARQUET_ROWS = 16
"""Read at once: few, because a dictionary may repeat one long text."""
ROW_OVERHEAD = 16
"""Bytes added to the size of each row's text, so that a block of empty rows ends too."""


def parquet_blocks(path: Path, size: int, corpus: CorpusConfig, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """Blocks of a Parquet file from row `offset`; earlier row groups are not read."""
    import pyarrow
    from pyarrow import parquet

    source = pyarrow.PythonFile(RemoteReader(path), "r") if isinstance(path, RemotePath) else path
    with parquet.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20) as file:
        total = file.metadata.num_rows
        columns = columns_of(str(path), file.schema_arrow, corpus.text_field)
        groups = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
        first = skipped = 0
        while first < len(groups) and skipped + groups[first] <= offset:
            skipped += groups[first]
            first += 1
        batches = file.iter_batches(
            PARQUET_ROWS, row_groups=range(first, len(groups)), columns=[*columns.names], use_threads=False
        )
        arrays = _from_row(offset - skipped, map(columns.texts, batches))
        yield from column_blocks(str(path), columns, arrays, offset, block_bytes, lambda row: size * row // total)


PARQUET = CorpusFormat((".parquet",), "arrow", parquet_blocks)


class Columns(NamedTuple):
    """The columns of a table that documents are read from."""

    names: tuple[str, ...]
    content: str
    """`text`, or ROW: rows as JSON."""

    def texts(self, batch: Any) -> Any:
        """The strings of a record batch, of one type."""
        import pyarrow

        if self.content != ROW:
            return batch.column(self.names[0]).cast(pyarrow.large_string())
        rows = (json.dumps(row, default=str) for row in batch.select(self.names).to_pylist())
        return pyarrow.array(rows, pyarrow.large_string())


def columns_of(where: str, schema: Any, text_field: str) -> Columns:
    """The string column `text_field`; or messages there, or what `divided_fields` names. Raises DataError: neither."""
    from pyarrow import types

    if schema.get_field_index(text_field) < 0:
        if divided := divided_fields(schema.names):
            return Columns((*divided, *({TOOLS} & {*schema.names})), ROW)
        raise DataError(
            f"{where}: no column {text_field!r}; set corpus.text_field to a column of the table: {listed(schema.names)}"
        )
    kind = schema.field(text_field).type
    text = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_list(text) or types.is_large_list(text):
        return Columns((text_field, *({TOOLS} & {*schema.names})), ROW)
    if not (types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)):
        raise DataError(f"{where}: column {text_field!r} is {kind}; set corpus.text_field to a string column")
    return Columns((text_field,), "text")


def column_blocks(
    where: str, columns: Columns, texts: Iterable[Any], row: int, block_bytes: int, consumed: Callable[[int], int]
) -> Iterator[SourceBlock]:
    """Blocks of texts from Arrow arrays; the first text is row `row`.

    A block ends with the text that brings it to `block_bytes`, wherever the arrays end, so reading may resume at the
    end of any block. `consumed` maps a row to the amount read before it.
    """
    from pyarrow import compute

    arrays, size, rows = [], 0, 0
    for column in texts:
        sizes = compute.call_function("binary_length", [column])
        lengths = compute.fill_null(sizes, 0).to_numpy(zero_copy_only=False)
        if (lengths > ROW_LIMIT).any():
            raise too_long(f"{where}: a text")
        ends = np.cumsum(lengths + ROW_OVERHEAD)
        begin = before = 0
        while begin < len(column):
            stop = int(np.searchsorted(ends, before + block_bytes - size)) + 1
            arrays.append(column[begin:stop])
            count = len(arrays[-1])
            row, rows, begin = row + count, rows + count, begin + count
            size += int(ends[begin - 1]) - before
            before = int(ends[begin - 1])
            if size >= block_bytes:
                yield SourceBlock(_stream_bytes(columns.content, arrays), rows, rows, row, consumed(row))
                arrays, size, rows = [], 0, 0
    if arrays:
        yield SourceBlock(_stream_bytes(columns.content, arrays), rows, rows, row, consumed(row))


def _from_row(skip: int, columns: Iterable[Any]) -> Iterator[Any]:
    for column in columns:
        if len(column) > skip:
            yield column[skip:]
        skip = max(0, skip - len(column))


def _stream_bytes(name: str, arrays: list[Any]) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    batch = pyarrow.record_batch([pyarrow.concat_arrays(arrays)], names=[name])
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()
