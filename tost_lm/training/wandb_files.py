"""What earlier launches left of a run in wandb's offline files, cut back to where the run goes on.

It is kept because wandb takes up to a millisecond to log a row anew, and a long run has 60,000.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tost_lm.files import write_whole

MAGIC = b":W&B"
HEADER_BYTES = 7
BLOCK_BYTES = 32768
WHOLE, LAST_PART = 1, 4


def cut_back(folder: Path, run_id: str, step: int) -> int:
    """Keep of run `run_id` in the offline folders of `folder` the rows up to `step`; other runs' folders go.

    Returns:
        The last step that is there; all before it are, too, as each launch goes on where the files before it end.
    """
    last = 0
    for launch in sorted(folder.glob("offline-run-*")):
        path = launch / f"run-{run_id}.wandb"
        data = path.read_bytes() if path.is_file() else b""
        end, last_here = _part_up_to(data, step)
        if last_here and end < len(data):
            write_whole(path, data[:end])  # a new file: a killed launch's wandb may still write into the old one
        elif not last_here:
            for file in launch.glob("*.wandb*"):
                file.unlink()
            shutil.rmtree(launch, ignore_errors=True)  # its log may still be open
        last = max(last, last_here)
    return last


def history(path: Path) -> list[Any]:
    """The rows of an offline file, as wandb's HistoryRecord."""
    return [record.history for _, record in _records(path.read_bytes()) if record.HasField("history")]


def _part_up_to(data: bytes, step: int) -> tuple[int, int]:
    """Where the rows up to `step` end in a file's bytes, and the last of their steps."""
    end = last = 0
    for record_end, record in _records(data):
        if record.HasField("history"):
            if record.history.step.num > step:
                break
            last = record.history.step.num
        end = record_end
    return end, last


def _records(data: bytes) -> Iterator[tuple[int, Any]]:
    """Whole records with their ends. A file is a header and a LevelDB log of (checksum 4, length 2, kind 1, data).

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    at, parts = HEADER_BYTES if data.startswith(MAGIC) else len(data), b""
    while True:
        room = BLOCK_BYTES - at % BLOCK_BYTES
        at += room if room < 7 else 0
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6 : at + 7]
        start, at = at + 7, at + 7 + length
        if at > len(data) or not b"\x01" <= kind <= b"\x04":
            return  # the end, or what a killed writer left unfinished
        parts += data[start:at]
        if kind[0] in (WHOLE, LAST_PART):
            try:
                yield at, Record.FromString(parts)
            except DecodeError:
                return
            parts = b""
