"""Progress on stderr, with rate and remaining time: on a terminal one line that changes, in a log one in 10 seconds."""

import sys
import time
from datetime import timedelta
from typing import Self

LINE_SECONDS = 10.0
TERMINAL_SECONDS = 0.2


class ProgressBar:
    """Call it with the amount done and the total (None: unknown); it prints rate and remaining time."""

    def __init__(self, step: str, unit: str) -> None:
        self._step, self._unit = step, unit
        self._on_terminal = sys.stderr.isatty()
        self._first: int | None = None
        self._started = self._written = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            print(end="\r\x1b[K", file=sys.stderr, flush=True)

    def __call__(self, done: int, total: int | None, note: str = "") -> None:
        if self._first is None:
            self._first = done
            self._started = self._written = time.monotonic()
        elif time.monotonic() - self._written >= (TERMINAL_SECONDS if self._on_terminal else LINE_SECONDS):
            self._written = time.monotonic()
            line = self._line(done, total, note)
            print(f"\r{line}\x1b[K" if self._on_terminal else f"{line}\n", end="", file=sys.stderr, flush=True)

    def _line(self, done: int, total: int | None, note: str) -> str:
        assert self._first is not None
        rate = (done - self._first) / (self._written - self._started)
        fields = [f"{self._step}: {_count(done)}{f' of {_count(total)}' if total else ''} {self._unit}"]
        fields.append(f"{_count(rate)} {self._unit}/s")
        if total and rate:
            fields.append(f"{timedelta(seconds=round((total - done) / rate))} left")
        return ", ".join([*fields, note] if note else fields)


def _count(number: float) -> str:
    return f"{number / 1e6:,.2f} M" if number >= 1e6 else f"{number:,.0f}"
