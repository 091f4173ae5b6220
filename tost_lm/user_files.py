"""Python files that a user names, with mixers or tasks of their own: they are run, and no other file ever is."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from tost_lm.errors import ConfigError, TostError, printable
from tost_lm.files import regular_file, sha256_bytes

PACKAGE = Path(__file__).parent
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
        with explained_errors(path, what):
            exec(compile(text, module.__file__, "exec"), module.__dict__)
    finally:
        RUNNING.pop()
    if not is_registered(sha256):
        raise ConfigError(f"{what}: {missing}")
    return sha256


@contextmanager
def explained_errors(path: Path, what: str) -> Iterator[None]:
    """An error of code in the user's file, or of code that it calls or that reads what it returns, is one line.

    Args:
        what: names the file in the line.

    Raises:
        ConfigError: with the place in the file, and with the error as its cause, which may be that of a lost rank.
    """
    try:
        yield
    except (TostError, BrokenPipeError):
        raise
    except (Exception, SystemExit) as error:  # sys.exit(0) would end the program as if it had succeeded
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, SystemExit) and Path(frames[-1].filename).is_relative_to(PACKAGE):
            raise  # from the handler of a signal
        lines = [f" (line {frame.lineno})" for frame in frames if frame.filename == str(path)]
        place = lines[-1] if lines else ""  # the text of a SyntaxError has it
        problem = f"{what}: {type(error).__name__}: {printable(str(error))}{place}; correct the file"
        raise ConfigError(problem) from error
