"""Plain text and JSON lines, also compressed. They are cut into blocks at line ends without parsing."""

import codecs
import io
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from tost_lm.data.settings import CorpusConfig
from tost_lm.data.sources.blocks import ROW_LIMIT, CorpusFormat, SourceBlock, too_long
from tost_lm.errors import DataError
from tost_lm.remote import open_file

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Endings of compressed text and JSON, and pyarrow's name of the codec."""


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


def line_blocks(path: Path, size: int, corpus: CorpusConfig, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
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


def text_blocks(path: Path, size: int, corpus: CorpusConfig, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """A plain text file as one block of any size, or as blocks of lines."""
    if corpus.text_documents == "line":
        yield from line_blocks(path, size, corpus, offset, block_bytes)
        return
    with ByteStream(path) as stream:
        payload = stream.read(ROW_LIMIT + 1)
        if len(payload) > ROW_LIMIT:
            raise DataError(
                f"{path}: a document of more than {ROW_LIMIT >> 30} GiB; divide it, or set corpus.text_documents=line"
            )
        yield SourceBlock(payload, 1, 1, len(payload), stream.consumed())


TEXT = CorpusFormat((".txt", ".md"), "text", text_blocks, may_be_compressed=True)
JSON_LINES = CorpusFormat((".jsonl", ".json"), "lines", line_blocks, may_be_compressed=True)
