"""The heartbeat: step, phase and time of a rank's last progress, in memory and in a file per rank."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Phase = Literal["building", "reading", "training", "validation", "saving", "leaving"]
PHASES: tuple[Phase, ...] = get_args(Phase)  # in the order of a step
LINE_BYTES = 256  # of every file, so that a line overwrites the previous one


class HeartbeatRecord(NamedTuple):
    rank: int
    host: str = ""
    pid: int = 0
    step: int = 0
    phase: Phase | Literal[""] = ""  # empty: the rank has no heartbeat
    time: float = 0.0  # Unix time [s] by the host's clock


class Heartbeat:
    """This rank's heartbeat: `last` is the newest record, `recorded_at` its time.monotonic() [s].

    The first record, "building", is in memory only, since the run folder does not exist yet.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.last = HeartbeatRecord(rank, socket.gethostname(), os.getpid(), 0, "building", time.time())
        self.recorded_at = time.monotonic()

    def record(self, step: int, phase: Phase) -> None:
        """Record progress at each step and change of phase. Takes about 20 µs, without fsync."""
        self.recorded_at = time.monotonic()
        self.last = self.last._replace(step=step, phase=phase, time=round(time.time(), 3))
        line = json.dumps(self.last._asdict()).ljust(LINE_BYTES - 1) + "\n"
        with suppress(OSError):  # the file is only informative: whoever must write reports a full or lost disk
            if not self.folder.exists():  # at the start, or after the run folder was renamed
                self.folder.mkdir(parents=True, exist_ok=True)
            # In place: replacing a file by renaming costs 1 ms on ext4, which writes its blocks at once.
            file = os.open(self.folder / f"rank_{self.last.rank:05d}.json", os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.pwrite(file, line.encode(), 0)
            finally:
                os.close(file)


def read_heartbeats(folder: Path) -> dict[int, HeartbeatRecord]:
    """The last record of each rank with a valid file, in rank order."""
    records = {}
    for path in sorted(folder.glob("rank_*.json")):
        with suppress(OSError, ValueError, TypeError):
            line, again = path.read_text(), path.read_text()
            while line != again:  # the rank wrote meanwhile
                line, again = again, path.read_text()
            record = HeartbeatRecord(**json.loads(line))
            records[record.rank] = record
    return records
