"""Files of torch.save, read without running anything in them."""

import pickle
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from tost_lm.errors import CheckpointError
from tost_lm.files import regular_file


def read_torch_file(path: Path) -> Any:
    """The content of a file of torch.save, restricted to types without code.

    Raises:
        CheckpointError: the file is damaged, or would call something.
    """
    damaged = f"{path}: damaged, or not a file of torch.save; copy it again"
    if not zipfile.is_zipfile(regular_file(path)):
        raise CheckpointError(damaged)
    try:
        with zipfile.ZipFile(path) as archive:
            content, size = sum(entry.file_size for entry in archive.infolist()), path.stat().st_size
            if content > size:  # torch.save does not compress
                raise CheckpointError(
                    f"{path}: refused: its content is {content:,} bytes, more than the file's {size:,}, so torch.save "
                    "did not write it; give another file"
                )
            bad_file = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{damaged} ({error})") from None
    if bad_file:
        raise CheckpointError(f"{damaged} (wrong checksum of {bad_file})")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        called = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it would call {called[1]}" if called else "it holds more than tensors and plain values"
        raise CheckpointError(f"{path}: refused: {reason}; nothing in it was run") from None
    except Exception as error:  # a broken pickle raises errors of many types
        raise CheckpointError(f"{damaged} ({type(error).__name__})") from None
