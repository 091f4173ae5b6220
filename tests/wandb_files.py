"""Rows of wandb's offline files. A file is a header and a log of (checksum 4, length 2, kind 1, data) fragments:
https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

HEADER_BYTES = 7
BLOCK_BYTES = 32768
WHOLE, LAST_FRAGMENT = 1, 4
"""Kinds of fragments."""


def history(path: Path) -> list[Any]:
    """The rows of an offline file, each a wandb HistoryRecord."""
    return [record.history for record in _records(path.read_bytes()) if record.HasField("history")]


def _records(data: bytes) -> Iterator[Any]:
    at, fragments = HEADER_BYTES, b""
    while True:
        room = BLOCK_BYTES - at % BLOCK_BYTES
        at += room if room < 7 else 0
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6 : at + 7]
        start, at = at + 7, at + 7 + length
        if at > len(data) or not b"\x01" <= kind <= b"\x04":
            return  # the end of the file, or an incomplete fragment of a killed writer
        fragments += data[start:at]
        if kind[0] in (WHOLE, LAST_FRAGMENT):
            try:
                yield Record.FromString(fragments)
            except DecodeError:
                return
            fragments = b""
