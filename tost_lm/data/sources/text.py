"""Plain text and JSON, also compressed.

Files of JSON lines and plain text are cut into blocks at line ends without parsing. The items of a JSON array become
JSON lines.
"""

import codecs
import io
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tost_lm.data.settings import CorpusConfig
from tost_lm.data.sources.blocks import ROW_LIMIT, CorpusFormat, Source, SourceBlock, blocks_of_rows, too_long
from tost_lm.errors import DataError
from tost_lm.remote import open_file

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Endings of compressed text and JSON, and pyarrow's name of the codec."""
ARRAY_LIMIT = 1 << 28
"""Bytes of the longest array. Its items take several times as many."""
FIRST_BYTES = 1 << 16


class ByteStream:
    """The bytes of a file, decompressed according to its ending, without a byte order mark."""

    def __init__(self, path: Path):
        self._codec = COMPRESSIONS.get(path.suffix.lower())
        self._disk = open_file(path)
        if self._codec:
            import pyarrow

            if not self._disk.seek(0, os.SEEK_END):  # no codec writes an empty file, but pyarrow accepts one
                raise OSError("truncated to 0 bytes")
            self._disk.seek(0)
            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(self._disk, "r"), self._codec)
            self._bytes = io.BufferedReader(stream)
        else:
            self._bytes = io.BufferedReader(self._disk)
        if self._bytes.peek(3)[:3] == codecs.BOM_UTF8:
            self._bytes.read(3)

    def __enter__(self) -> "ByteStream":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bytes.close()
        self._disk.close()

    def read(self, count: int = -1) -> bytes:
        """The next `count` bytes, fewer only at the end."""
        return self._bytes.read(count)

    def skip(self, count: int) -> None:
        """Skip `count` bytes."""
        if not self._codec:
            self._bytes.seek(count, io.SEEK_CUR)
            return
        while count and (skipped := len(self.read(min(count, 1 << 20)))):
            count -= skipped

    def consumed(self) -> int:
        """Number of bytes read from the file on disk."""
        return self._disk.tell() if self._codec else self._bytes.tell()


def line_blocks(path: Path, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """Blocks of whole lines, at most `block_bytes` long unless one line is longer."""
    with ByteStream(path) as stream:
        stream.skip(offset)
        rest = b""  # after the last newline: shorter than a block
        while True:
            reads = [rest, stream.read(block_bytes - len(rest))]
            while reads[-1] and b"\n" not in reads[-1]:
                if len(reads) * block_bytes > ROW_LIMIT:
                    raise too_long(f"{path}: a line", ROW_LIMIT)
                reads.append(stream.read(block_bytes))
            cut = reads[-1].rfind(b"\n") + 1
            rest = reads[-1][cut:]
            reads[-1] = reads[-1][:cut]
            payload = b"".join(reads)
            if not payload:
                return
            offset += len(payload)
            yield SourceBlock(payload, count_lines(payload), payload.count(b"\n"), offset, stream.consumed())


def count_lines(payload: bytes) -> int:
    """Number of lines that are not blank."""
    return sum(map(bool, map(bytes.strip, payload.split(b"\n"))))


def text_block(path: Path, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """A plain text file as one block of any size."""
    del offset, block_bytes
    with ByteStream(path) as stream:
        payload = stream.read(ROW_LIMIT + 1)
        if len(payload) > ROW_LIMIT:
            raise DataError(
                f"{path}: a document of more than {ROW_LIMIT >> 30} GiB; divide it, or set corpus.text_documents=line"
            )
        yield SourceBlock(payload, 1, 1, len(payload), stream.consumed())


def array_blocks(path: Path, size: int, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """Blocks of JSON lines, one item a line, from item `offset`. The whole array is in memory."""
    with ByteStream(path) as stream:
        data = stream.read(ARRAY_LIMIT + 1)
    if len(data) > ARRAY_LIMIT:
        raise DataError(f"{path}: an array of more than {ARRAY_LIMIT >> 20} MiB; convert it to JSON lines")
    items = json.loads(data)
    yield from blocks_of_rows(map(_line, items), offset, block_bytes, lambda number: size * number // len(items))


def _line(item: Any) -> bytes:
    return json.dumps(item).encode()


def _open_text(path: Path, size: int, corpus: CorpusConfig) -> Source:
    if corpus.text_documents == "file":
        return Source("text", "line", partial(text_block, path))
    return Source("text", "line", partial(line_blocks, path))


def _open_lines(path: Path, size: int, corpus: CorpusConfig) -> Source:
    return Source("lines", "line", partial(line_blocks, path))


def _open_json(path: Path, size: int, corpus: CorpusConfig) -> Source:
    """A file that begins as an array is one; any other holds JSON lines."""
    with ByteStream(path) as stream:
        is_array = stream.read(FIRST_BYTES).lstrip().startswith(b"[")
    return Source("lines", "item", partial(array_blocks, path, size)) if is_array else _open_lines(path, size, corpus)


TEXT = CorpusFormat((".txt", ".md"), _open_text, may_be_compressed=True)
JSON_LINES = CorpusFormat((".jsonl",), _open_lines, may_be_compressed=True)
JSON = CorpusFormat((".json",), _open_json, may_be_compressed=True)
