"""What goes wrong with writing a checkpoint, in one line."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tost_lm.errors import CheckpointError

AGAIN = "start again: the run goes on from its newest complete checkpoint"


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """To be put around the writing of a file.

    Raises:
        CheckpointError: the system refuses; the line names the file, its reason and what to do.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _number(error)
        reason = os.strerror(number) if number else str(error)
        full = number in (errno.ENOSPC, errno.EDQUOT)
        mend = "free space or lower checkpoint.keep" if full else "mend that"
        raise CheckpointError(f"{path}: cannot be written: {reason}; {mend} and {AGAIN}") from None


def _number(error: OSError | SafetensorError) -> int:
    """The system's number of an error; 0 if there is none."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else 0
