"""Plain text and JSON, also compressed.

Files of JSON lines and plain text are cut into blocks at line ends without parsing. The items of a JSON array become
JSON lines, one at a time.
"""

import codecs
import io
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType

from tost_lm.data.settings import CorpusConfig
from tost_lm.data.sources.blocks import ROW_LIMIT, CorpusFormat, Source, SourceBlock, blocks_of_rows, too_long
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


FIRST_BYTES = 1 << 16
READ_BYTES = 1 << 20
FIRST = re.compile(r"\[[ \t\r\n]*(\])?")
NEXT = re.compile(r"[ \t\r\n]*(?:,|(\]))[ \t\r\n]*")
SCAN = json.JSONDecoder(parse_int=str, parse_float=str, strict=False).raw_decode
"""Finds the end of an item, even of one with control characters that JSON forbids.

Of ijson's parsers one writes "?" for lone surrogates and one holds the whole file.
"""
LONGEST_TOKEN = 16
"""At least the characters of a JSON token (other than a string) that the end of the text read so far may cut."""


def array_blocks(path: Path, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """Blocks of JSON lines, one item a line, from item `offset`."""
    with ByteStream(path) as stream:
        yield from blocks_of_rows(_items(path, stream), offset, block_bytes, lambda _: stream.consumed())


def _first_bytes(stream: ByteStream) -> bytes:
    """Some bytes that begin with the first non-blank one."""
    while head := stream.read(FIRST_BYTES):
        if head := head.lstrip():
            return head
    return b""


def _items(path: Path, stream: ByteStream) -> Iterator[bytes]:
    """The items as the file has them, each on one line.

    A newline becomes a carriage return: equivalent between tokens, and equally forbidden in strings.
    """
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    text, at, pattern, number, ended = decode(_first_bytes(stream)), 0, FIRST, 0, False
    while match := pattern.match(text, at):
        if match[1]:
            if text[match.end() :].strip() or _first_bytes(stream):
                raise DataError(f"{path}: text follows the end of the array; remove it")
            return
        begin = match.end()
        end = _item_end(text, begin, ended, f"{path}, item {number}")
        if end:
            yield text[begin:end].replace("\n", "\r").encode(errors="surrogateescape")
            at, pattern, number = end, NEXT, number + 1
            continue
        if len(text) - at > ROW_LIMIT:
            raise too_long(f"{path}, item {number}", ROW_LIMIT)
        more = stream.read(max(READ_BYTES, len(text) - at))  # doubles, so that a long item is scanned only a few times
        text, at, ended = text[at:] + decode(more, not more), 0, not more


def _item_end(text: str, begin: int, ended: bool, where: str) -> int | None:
    """Where an item ends; None if the item or the sign after it is not read yet."""
    try:
        _, end = SCAN(text, begin)
        if NEXT.match(text, end):
            return end
        problem, place = "Expecting ',' delimiter", end + len(text[end:]) - len(text[end:].lstrip())
    except json.JSONDecodeError as error:
        problem, place = error.msg, error.pos
    except RecursionError:
        raise DataError(f"{where}: nested too deeply; correct or remove the item") from None
    incomplete = problem.startswith("Unterminated") or place > len(text) - LONGEST_TOKEN
    if ended or not incomplete:
        raise DataError(f"{where}: not JSON: {problem}; correct the file")
    return None


def _open_text(path: Path, size: int, corpus: CorpusConfig) -> Source:
    if corpus.text_documents == "file":
        return Source("text", "line", partial(text_block, path), lambda: 1)
    return Source("text", "line", partial(line_blocks, path))


def _open_lines(path: Path, size: int, corpus: CorpusConfig) -> Source:
    return Source("lines", "line", partial(line_blocks, path))


def _open_json(path: Path, size: int, corpus: CorpusConfig) -> Source:
    """A file that begins as an array is one; any other holds JSON lines."""
    with ByteStream(path) as stream:
        is_array = _first_bytes(stream).startswith(b"[")
    return Source("lines", "item", partial(array_blocks, path)) if is_array else _open_lines(path, size, corpus)


TEXT = CorpusFormat((".txt", ".md"), _open_text, may_be_compressed=True)
JSON_LINES = CorpusFormat((".jsonl",), _open_lines, may_be_compressed=True)
JSON = CorpusFormat((".json",), _open_json, may_be_compressed=True)
