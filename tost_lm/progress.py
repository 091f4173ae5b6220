"""Progress on stderr, with rate and remaining time: a bar on a terminal, a line every 10 seconds in a log."""

import sys
import time
from datetime import timedelta
from typing import Any, Self

LINE_SECONDS = 10.0


class Progress:
    """Call it with the amount done and the total (None: unknown); it prints rate and remaining time."""

    def __init__(self, step: str, unit: str) -> None:
        self._step = step
        self._unit = unit
        self._first: int | None = None
        self._started = self._written = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int | None, note: str = "") -> None:
        if self._first is None:
            self._first = done
            self._started = self._written = time.monotonic()
            self._bar = _bar(desc=self._step, unit=self._unit, initial=done) if sys.stderr.isatty() else None
        elif self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._written >= LINE_SECONDS:
            self._written = time.monotonic()
            print(self._line(done, total, note), file=sys.stderr, flush=True)

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


def _bar(**settings: Any) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(file=sys.stderr, unit_scale=True, leave=False, **settings)
