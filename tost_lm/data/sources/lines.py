"""Plain text and JSON lines, also compressed. They are cut into blocks at line ends without parsing."""

import codecs
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tost_lm.data.settings import CorpusConfig
from tost_lm.data.sources.blocks import ROW_LIMIT, CorpusFormat, SourceBlock, too_long
from tost_lm.errors import DataError
from tost_lm.remote import open_file

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Endings of compressed text and JSON, and pyarrow's name of the codec."""


@contextmanager
def _opened(path: Path, offset: int) -> Iterator[tuple[io.BufferedReader, io.RawIOBase]]:
    """The bytes of a file from an offset, decompressed according to its ending, without a byte order mark; and the file
    on disk."""
    codec = COMPRESSIONS.get(path.suffix.lower())
    with open_file(path) as disk:
        raw: Any = disk
        if codec:
            import pyarrow

            if not disk.seek(0, os.SEEK_END):  # no codec writes an empty file, but pyarrow accepts one
                raise OSError("truncated to 0 bytes")
            disk.seek(0)
            raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(disk, "r"), codec)
        with io.BufferedReader(raw) as stream:
            if stream.peek(3)[:3] == codecs.BOM_UTF8:
                stream.read(3)
            if not codec:
                stream.seek(offset, io.SEEK_CUR)
            while codec and offset and (skipped := len(stream.read(min(offset, 1 << 20)))):
                offset -= skipped
            yield stream, disk


def line_blocks(path: Path, size: int, corpus: CorpusConfig, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """Blocks of whole lines, at most `block_bytes` long unless one line is longer."""
    with _opened(path, offset) as (stream, disk):
        rest = b""  # after the last newline: shorter than a block
        while True:
            reads = [rest, stream.read(block_bytes - len(rest))]
            while reads[-1] and b"\n" not in reads[-1]:
                if len(reads) * block_bytes > ROW_LIMIT:
                    raise too_long(f"{path}: a line")
                reads.append(stream.read(block_bytes))
            cut = reads[-1].rfind(b"\n") + 1
            rest = reads[-1][cut:]
            reads[-1] = reads[-1][:cut]
            payload = b"".join(reads)
            if not payload:
                return
            offset += len(payload)
            rows = sum(map(bool, map(bytes.strip, payload.split(b"\n"))))  # lines that are not blank
            yield SourceBlock(payload, rows, payload.count(b"\n"), offset, disk.tell())


def text_blocks(path: Path, size: int, corpus: CorpusConfig, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """A plain text file as one block of any size, or as blocks of lines."""
    if corpus.text_documents == "line":
        yield from line_blocks(path, size, corpus, offset, block_bytes)
        return
    with _opened(path, 0) as (stream, disk):
        payload = stream.read(ROW_LIMIT + 1)
        if len(payload) > ROW_LIMIT:
            raise DataError(
                f"{path}: a document of more than {ROW_LIMIT >> 30} GiB; divide it, or set corpus.text_documents=line"
            )
        yield SourceBlock(payload, 1, 1, len(payload), disk.tell())


TEXT = CorpusFormat((".txt", ".md"), "text", text_blocks, may_be_compressed=True)
JSON_LINES = CorpusFormat((".jsonl", ".json"), "lines", line_blocks, may_be_compressed=True)
