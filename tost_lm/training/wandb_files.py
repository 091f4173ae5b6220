"""Truncates wandb's offline files of earlier launches to the step from which a run resumes.

wandb's own means need its server. Offline, wandb 0.31 ignores `resume`, and after `resume_from="ID?_step=5"` the files
still have the steps after 5 twice. Logging all rows again would be simpler, but wandb takes up to a millisecond per
row, and a long run has 60,000.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tost_lm.files import write_atomically

MAGIC = b":W&B"
HEADER_BYTES = 7
BLOCK_BYTES = 32768
WHOLE, LAST_FRAGMENT = 1, 4


def truncate_runs(folder: Path, run_id: str, step: int) -> int:
    """Keep the rows of run `run_id` up to `step` in the offline folders of `folder`; delete the folders of other runs.

    Returns:
        The last step in the files. They have all rows before it, because each launch appends to those of earlier ones.
    """
    last = 0
    for launch in sorted(folder.glob("offline-run-*")):
        path = launch / f"run-{run_id}.wandb"
        data = path.read_bytes() if path.is_file() else b""
        end, last_in_file = _end_of_rows(data, step)
        if last_in_file and end < len(data):
            write_atomically(
                path, data[:end]
            )  # a new file, because the wandb of a killed launch may still write to the old one
        elif not last_in_file:
            for file in launch.glob("*.wandb*"):
                file.unlink()
            shutil.rmtree(launch, ignore_errors=True)  # its log may still be open
        last = max(last, last_in_file)
    return last


def history(path: Path) -> list[Any]:
    """The rows of an offline file, each a wandb HistoryRecord."""
    return [record.history for _, record in _records(path.read_bytes()) if record.HasField("history")]


def _end_of_rows(data: bytes, step: int) -> tuple[int, int]:
    """The end [bytes] of the rows up to `step` in a file, and the last of their steps."""
    end = last = 0
    for record_end, record in _records(data):
        if record.HasField("history"):
            if record.history.step.num > step:
                break
            last = record.history.step.num
        end = record_end
    return end, last


def _records(data: bytes) -> Iterator[tuple[int, Any]]:
    """Complete records with their ends [bytes]. A file is a header and a LevelDB log of (checksum 4, length 2, kind 1,
    data) fragments.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    at, fragments = HEADER_BYTES if data.startswith(MAGIC) else len(data), b""
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
                yield at, Record.FromString(fragments)
            except DecodeError:
                return
            fragments = b""
