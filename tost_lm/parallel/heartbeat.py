"""What each rank is doing and since when: in memory for its own watch, and in a file of its own for everybody else."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Phase = Literal["building", "reading", "training", "validation", "saving", "leaving"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""In the order in which a step goes through them."""


class Beat(NamedTuple):
    """A rank's word that it has come so far."""

    rank: int
    host: str
    pid: int
    step: int
    phase: Phase
    time: float
    """Unix time [s] by the clock of its host."""


class Heartbeat:
    """This rank's beats; `last` is the newest and `beaten_at` its time.monotonic() [s]. It begins with "building",
    in memory alone: the folder of the run is made by the time of the first `beat`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.last = Beat(rank, socket.gethostname(), os.getpid(), 0, "building", time.time())
        self._path, self._width = folder / f"rank_{rank:05d}.json", 0
        self._truncate = os.O_TRUNC  # once: what an earlier launch left may be longer
        self.beaten_at = time.monotonic()

    def beat(self, step: int, phase: Phase) -> None:
        """To be called at each step and change of phase: the rank goes on. Takes some 20 µs; nothing is synced."""
        self.beaten_at = time.monotonic()
        self.last = self.last._replace(step=step, phase=phase, time=round(time.time(), 3))
        line = json.dumps(self.last._asdict())
        self._width = max(self._width, len(line))  # in place, so it must cover the line before
        # A disk that is full or gone is for those to report who must write: this is only for the picture.
        with suppress(OSError):
            try:
                self._write(line.ljust(self._width) + "\n")
            except FileNotFoundError:  # at the start, and when the run's folder was set aside
                self.folder.mkdir(parents=True, exist_ok=True)
                self._write(line.ljust(self._width) + "\n")

    def remove_ranks_from(self, world_size: int) -> None:
        """Remove what ranks left behind that this launch does not have."""
        for path in self.folder.glob("rank_*.json"):
            number = path.stem.removeprefix("rank_")
            if number.isdecimal() and int(number) >= world_size:
                path.unlink(missing_ok=True)

    def _write(self, line: str) -> None:
        # Not by renaming: to replace a file by another costs 1 ms on ext4, which writes its blocks at once.
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | self._truncate, 0o666)
        try:
            os.pwrite(file, line.encode(), 0)
            self._truncate = 0
        finally:
            os.close(file)


def read_heartbeats(folder: Path) -> dict[int, Beat]:
    """The last beat of each rank that has a whole file there, in order of rank."""
    beats = {}
    for path in sorted(folder.glob("rank_*.json")):
        with suppress(OSError, ValueError, TypeError):
            line, again = path.read_text(), path.read_text()
            while line != again:  # read while it was written
                line, again = again, path.read_text()
            beat = Beat(**json.loads(line))
            beats[beat.rank] = beat
    return beats
