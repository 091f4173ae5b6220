"""Python files that a user names, with mixers or tasks of their own: they are run, and no other file ever is."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tost_lm.errors import ConfigError, printable
from tost_lm.files import regular_file, sha256_bytes

RUNNING: list[tuple[Path, str]] = []
"""The file that is being run, and its SHA-256."""


def run_user_file(path: Path, what: str, is_registered: Callable[[str], bool], missing: str) -> str:
    """Run a file, once for the same text, and return its SHA-256.

    Args:
        what: names the file in errors.
        is_registered: whether the text with this SHA-256 has registered what it is run for.
        missing: the error if it has not.

    Raises:
        ConfigError: the file cannot be read, fails, or registers nothing.
    """
    try:
        text = regular_file(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}: cannot be read: {error.strerror}; name a Python file") from None
    sha256 = sha256_bytes(text)
    if is_registered(sha256):
        return sha256
    module = ModuleType(f"tost_plugin_{sha256[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where pickle and pydantic look for its classes
    RUNNING.append((path, sha256))
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit(0) would end the program as if it had succeeded
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f" (line {frame.lineno})" for frame in frames if frame.filename == module.__file__]
        place = lines[-1] if lines else ""  # the text of a SyntaxError has it
        raise ConfigError(f"{what}: {type(error).__name__}: {printable(str(error))}{place}; correct the file") from None
    finally:
        RUNNING.pop()
    if not is_registered(sha256):
        raise ConfigError(f"{what}: {missing}")
    return sha256
