"""One-line messages for errors while a checkpoint is written."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tost_lm.errors import CheckpointError
from tost_lm.model.checkpoint import write_failure

RESUME = "run the same command to resume from the newest complete checkpoint"


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raises CheckpointError, with the file, the system's reason and a fix, when `path` cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number, reason = write_failure(error)
        full = number in (errno.ENOSPC, errno.EDQUOT)
        fix = "free space or lower checkpoint.keep_latest_k" if full else "remove the cause"
        raise CheckpointError(f"{path}: cannot be written: {reason}; {fix} and {RESUME}") from None
