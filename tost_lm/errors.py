"""Errors that a user can fix: a program prints one line for each, without a traceback, and exits with 2."""

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


def printable(text: str, keep: str = "") -> str:
    """A text with control characters (except those in `keep`) and lone surrogates escaped."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def listed(names: Iterable[str]) -> str:
    """The first names, in at most about 200 characters."""
    first = list(islice(names, 9))
    shown = printable(", ".join(name[:201] for name in first[:8]))
    return (shown[:200] + " …" if len(shown) > 200 or len(first) > 8 else shown) or "none"


EXIT_BAD_INPUT = 2
SHOWN = 100  # characters of a path in a file


def first_problem(error: "ValidationError") -> str:
    """The first problem of a file that pydantic refuses, `path.to.field: problem`, in one line."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return printable(": ".join([".".join(map(str, problem["loc"]))[:SHOWN], problem["msg"]]).removeprefix(": "))


def first_line(error: Exception) -> str:
    """The first line of an error's message, without a full stop, up to 300 characters; if it announces the cause, the
    last line; its class if there is no message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if lines[0].endswith(":") else 0].strip().rstrip(".")[:300]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name as a hint after an unknown one, ` (did you mean …?)`; empty if none is near."""
    near = get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def install_hint(extra: str) -> str:
    """The command to type where packages of an extra are missing. No package index has this project."""
    return f"run pip install '.[{extra}]' in a checkout of tost_lm"


class TostError(Exception):
    """Base of all errors that are printed as plain lines. The message names the problem and the fix."""

    printed_here: bool | None = None
    """Whether this rank prints an error that all ranks raise; None: this rank may be the only one with the error."""
    exit_code = EXIT_BAD_INPUT
    """Of the program; another one if another rank ended by Ctrl-C or SIGTERM."""


class ConfigError(TostError, ValueError):
    """A configuration file, an override or a combination of settings cannot be used."""


class DataError(TostError):
    """A corpus, tokenizer or shard folder is missing, damaged or inconsistent with the others."""


class StorageError(DataError):
    """A file at a URL cannot be read or written: the storage cannot be reached, refuses, or has other bytes."""


class CheckpointError(TostError):
    """A checkpoint is missing, incomplete, damaged or of another model."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint differs from its hash."""


class TrainingError(TostError):
    """A run cannot continue: for example it is out of memory, or all steps are skipped."""


class LostRankError(TostError):
    """Another rank ended the run. One line, equal on all remaining ranks, names it, and one of them prints it."""


class CorruptionError(TostError):
    """Silent data corruption: the memory of a rank has changed."""
