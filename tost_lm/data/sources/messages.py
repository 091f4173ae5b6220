"""Messages about a corpus, each one line that is safe for a terminal."""

from collections.abc import Iterable
from itertools import islice

from tost_lm.data.config import CorpusConfig
from tost_lm.errors import DataError


def printable(text: str, keep: str = "") -> str:
    """A text with control characters (except those in `keep`) and lone surrogates escaped."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def listed(names: Iterable[str]) -> str:
    """The first names, in at most about 200 characters."""
    first = list(islice(names, 9))
    shown = printable(", ".join(name[:201] for name in first[:8]))
    return (shown[:200] + " …" if len(shown) > 200 or len(first) > 8 else shown) or "none"


def too_long(what: str, limit: int) -> DataError:
    """The error for a row of more than `limit` bytes."""
    return DataError(f"{what} is longer than {limit >> 30} GiB; divide it into shorter rows")


def too_many_bad(where: str, reason: str, bad: int, rows: int, more: str = "") -> DataError:
    """The error for a corpus with more bad rows than allowed; `where` and `reason` describe one of them."""
    return DataError(
        f"{where}: {reason}; {bad} of {rows} rows cannot be read{more}: correct them, or raise corpus.max_bad_fraction"
    )


def corpus_changed(corpus: CorpusConfig) -> DataError:
    """The error for a corpus whose fingerprint changed while it was read."""
    return DataError(f"corpus.source {corpus.source}: changed while it was read; run the same command again")
