"""Parquet files. Their rows become JSON lines with the columns that documents are read from."""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from tost_lm.data.settings import CorpusConfig
from tost_lm.data.sources.blocks import CorpusFormat, SourceBlock, divided_fields, row_blocks
from tost_lm.data.sources.chats import TOOLS
from tost_lm.errors import DataError, listed
from tost_lm.remote import RemotePath, RemoteReader

PARQUET_ROWS = 16
"""Read at once: few, because a dictionary may repeat one long text."""


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
            PARQUET_ROWS, row_groups=range(first, len(groups)), columns=columns, use_threads=False
        )
        rows = islice(chain.from_iterable(map(_lines, batches)), offset - skipped, None)
        yield from row_blocks(str(path), rows, offset, block_bytes, lambda row: size * row // total)


PARQUET = CorpusFormat((".parquet",), "rows", parquet_blocks)


def columns_of(where: str, schema: Any, text_field: str) -> list[str]:
    """The names of the columns that documents are read from: `text_field`, a string or messages; or what
    `divided_fields` names. Raises DataError: neither."""
    from pyarrow import types

    tools = [TOOLS] if TOOLS in schema.names else []
    if schema.get_field_index(text_field) < 0:
        if divided := divided_fields(schema.names):
            return [*divided, *tools]
        raise DataError(
            f"{where}: no column {text_field!r}; set corpus.text_field to a column of the table: {listed(schema.names)}"
        )
    kind = schema.field(text_field).type
    text = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_list(text) or types.is_large_list(text):
        return [text_field, *tools]
    if not (types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)):
        raise DataError(f"{where}: column {text_field!r} is {kind}; set corpus.text_field to a string column")
    return [text_field]


def _lines(batch: Any) -> Iterator[bytes]:
    """The rows of a record batch in JSON. A text that is not UTF-8 stays as it is, on one line."""
    import pyarrow

    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        texts = batch.column(0).cast(pyarrow.large_string()).cast(pyarrow.large_binary()).to_pylist()
        rows = [{batch.schema.names[0]: text} for text in texts]
    for row in rows:
        try:
            yield to_json(row, fallback=str)
        except PydanticSerializationError:
            yield row[batch.schema.names[0]].replace(b"\n", b" ")
