"""JSON files that hold one array of rows: its items become JSON lines, one at a time."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tost_lm.data.sources.blocks import ROW_LIMIT, SourceBlock, blocks_of_rows
from tost_lm.data.sources.lines import ByteStream
from tost_lm.data.sources.messages import too_long
from tost_lm.errors import DataError

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


def is_array(path: Path) -> bool:
    """Whether a JSON file begins as an array; otherwise it holds JSON lines."""
    with ByteStream(path) as stream:
        return _first_bytes(stream).startswith(b"[")


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
