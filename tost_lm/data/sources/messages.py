"""What is said of a corpus that cannot be used, each in one line that a terminal can show."""

from collections.abc import Iterable
from itertools import islice

from tost_lm.data.config import CorpusConfig
from tost_lm.errors import DataError


def printable(text: str, keep: str = "") -> str:
    """A text in UTF-8 in which control characters, but those to keep, and halves of surrogate pairs are escaped."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def listed(names: Iterable[str]) -> str:
    """The first few names in about 200 characters."""
    first = list(islice(names, 9))
    shown = printable(", ".join(name[:201] for name in first[:8]))
    return (shown[:200] + " …" if len(shown) > 200 or len(first) > 8 else shown) or "none"


def too_long(what: str, limit: int) -> DataError:
    """The refusal of a row of more than `limit` bytes."""
    return DataError(f"{what} is longer than {limit >> 30} GiB; divide it into shorter ones")


def too_many_bad(where: str, reason: str, bad: int, rows: int, more: str = "") -> DataError:
    """The refusal of a corpus of which so many of the rows cannot be read; `where` and `reason` are of one of them."""
    return DataError(
        f"{where}: {reason}; {bad} of {rows} rows cannot be read{more}: mend them, or allow more with "
        "corpus.max_bad_share"
    )


def changed(corpus: CorpusConfig) -> DataError:
    """The refusal of a corpus whose fingerprint is another than before it was read."""
    return DataError(f"corpus.source {corpus.source}: changed while it was read; the same command begins anew")
