"""Loggers, a file for each: where the rows of a run's records are shown as well. The JSONL files are the reference.

A user's logger is a class in a file that `run.loggers` names, and that calls `register`. Its errors end no run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tost_lm.config import Section, validate
from tost_lm.errors import ConfigError, first_line
from tost_lm.user_files import RUNNING, run_user_file

Row = Mapping[str, Any]
"""Values by name, with `step`; a value may be None."""


class LoggedLaunch(NamedTuple):
    """What a logger knows of the launch."""

    folder: Path
    """The run folder."""
    name: str
    first_step: int
    """Steps before this launch; an earlier launch may have logged some after them."""
    run_id: str
    """`Logger.run_id` of earlier launches, which checkpoints keep; empty: the run is new."""
    config: dict[str, Any]
    """All settings of the run, without secrets."""
    close_s: float
    """`close` may take this long [seconds]."""


class Logger(ABC):
    """Opened by rank 0. Where it raises, a warning is printed, and it is called no more."""

    package: ClassVar[str] = ""
    """What it imports; empty: nothing that may be missing."""
    extra: ClassVar[str] = "train"
    """The extra of this project that installs the package."""
    settings: ClassVar[type[Section]] = Section
    """Of `run.logger_settings`; a `Section` alone has none."""
    run_id = ""
    """Identifies the run to the logger; empty: it needs none."""

    @abstractmethod
    def __init__(self, launch: LoggedLaunch, settings: Any) -> None:
        """Raises ConfigError if a setting of the user is wrong, which ends the launch."""

    @abstractmethod
    def log(self, row: Row) -> None:
        """Show the values of a step; rows of one step may have different values."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all rows are shown."""

    @classmethod
    def is_on(cls) -> bool:
        """Whether variables of the logger's own do not switch it off."""
        return True


LOGGERS = {
    "wandb": "tost_lm.pretrain.loggers.wandb",
    "tensorboard": "tost_lm.pretrain.loggers.tensorboard",
}
"""The module of each logger, whose class is `LOGGER`."""
_OF_FILES: dict[str, type[Logger]] = {}


def register(logger: type[Logger]) -> None:
    """Make a class the logger of the file that is being run. Raises ConfigError if it is no `Logger`."""
    path, sha256 = RUNNING[-1]
    if not issubclass(logger, Logger):
        raise ConfigError(f"run.loggers {path}: {logger.__name__} is no tost_lm.pretrain.loggers.Logger; derive it")
    _OF_FILES[sha256] = logger


def logger_of(name: str) -> type[Logger]:
    """The class of one of `run.loggers`, whose file is run. Raises ConfigError if there is none."""
    if not name.endswith(".py"):
        return import_module(LOGGERS[name]).LOGGER
    missing = "registers no logger; call tost_lm.pretrain.loggers.register in it"
    return _OF_FILES[run_user_file(Path(name), f"run.loggers {name}", _OF_FILES.__contains__, missing)]


def check_loggers(names: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError for a logger that does not exist, or whose settings are wrong; runs the files of users."""
    known = {Path(name).stem: name for name in names}
    if unknown := [stem for stem in settings if stem not in known]:
        raise ConfigError(f"run.logger_settings.{unknown[0]}: run.loggers has no such logger; remove it")
    for stem, name in known.items():
        if name not in LOGGERS and not name.endswith(".py"):
            raise ConfigError(f"run.loggers: no such logger: {name}; choose from {', '.join(LOGGERS)}, or name a file")
        validate(logger_of(name).settings, dict(settings.get(stem, {})), f"run.logger_settings.{stem}")


class GuardedLogger:
    """A logger whose first error is a warning, after which it gets no rows."""

    def __init__(self, name: str, launch: LoggedLaunch, settings: Mapping[str, Any], warn: Callable[[str], None]):
        kind, self._warn, self._name = logger_of(name), warn, Path(name).stem
        self._logger: Logger | None = None
        try:
            self._logger = kind(launch, validate(kind.settings, dict(settings), name))
        except ConfigError:
            raise
        except Exception as error:  # any error of its libraries, here and below
            self._fail(error)

    @property
    def run_id(self) -> str:
        return self._logger.run_id if self._logger else ""

    def log(self, row: Row) -> None:
        if (logger := self._logger) is None:
            return
        try:
            logger.log(row)
        except Exception as error:
            self._fail(error)
            with suppress(Exception):
                logger.close()

    def close(self) -> None:
        try:
            if self._logger:
                self._logger.close()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._logger = None
        self._warn(f"{self._name} failed ({first_line(error)}); metrics.jsonl continues")
