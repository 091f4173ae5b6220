"""What goes wrong with writing a checkpoint, in one line."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tost_lm.errors import CheckpointError
from tost_lm.model.checkpoint import why_not_written

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
        number, reason = why_not_written(error)
        full = number in (errno.ENOSPC, errno.EDQUOT)
        mend = "free space or lower checkpoint.keep" if full else "mend that"
        raise CheckpointError(f"{path}: cannot be written: {reason}; {mend} and {AGAIN}") from None
