"""Weights & Biases: one of its runs for all launches.

Offline, each launch has a file, and `wandb sync` merges all files of a run id into one run. Where a launch repeats
steps that a killed one had logged, both are in the files, and wandb keeps one. Online, only steps after wandb's last
one are logged. A thread logs the rows, so a slow or hung wandb does not delay training.
"""

import os
import queue
import threading
import uuid
from typing import Any

from tost_lm.errors import ConfigError, TostError, first_line
from tost_lm.pretrain.loggers import LoggedLaunch, Logger, Row


class WandbLogger(Logger):
    package = "wandb"

    def __init__(self, launch: LoggedLaunch, settings: Any) -> None:
        """Raises ConfigError if wandb refuses the mode of WANDB_MODE."""
        self.run_id, self._close_s = launch.run_id or uuid.uuid4().hex, launch.close_s
        self._failure: Exception | None = None
        self._run = _start(launch, self.run_id)
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._log_rows, name="wandb rows", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        """Log the values of a step; wandb merges those of equal steps."""
        if self._failure:
            raise self._failure
        self._rows.put(row)

    def close(self) -> None:
        """Wait up to `close_s` until all rows are logged, and end wandb's process."""
        import wandb

        self._rows.put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            raise TostError(f"it did not finish within {self._close_s:.0f} s")
        wandb.teardown()  # wandb would do it at exit, with a traceback if its process was killed
        if self._failure:
            raise self._failure

    @classmethod
    def is_on(cls) -> bool:
        return _mode() != "disabled"

    def _log_rows(self) -> None:
        try:
            while row := self._rows.get():
                if row["step"] >= self._run.step:  # online, wandb already has earlier steps
                    values = {name: value for name, value in row.items() if value is not None}
                    self._run.log(values, step=row["step"])
            self._run.finish()
        except Exception as error:  # any error: wandb's process was killed, its disk is full, …
            self._failure = error


LOGGER = WandbLogger


def _mode() -> str:
    return os.environ.get("WANDB_MODE", "offline")


def _start(launch: LoggedLaunch, run_id: str) -> Any:
    import wandb

    mode = _mode()
    try:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tost_lm"),
            name=launch.name,
            id=run_id,
            resume="allow",
            dir=launch.folder,
            mode=mode,  # pyright: ignore[reportArgumentType]
            config=launch.config,
            # wandb's metadata would have the address of the repository, perhaps with a token.
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True, disable_git=True),
        )
    except (wandb.Error, ValueError) as error:
        raise ConfigError(
            f"WANDB_MODE={mode}: {first_line(error)}; set it to offline, or leave wandb out of run.loggers"
        ) from None
