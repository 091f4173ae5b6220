"""Logs a run to wandb. The JSONL files are the reference; wandb gets the same rows."""

import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tost_lm.errors import ConfigError
from tost_lm.training.config import PretrainConfig
from tost_lm.training.loggers import Row
from tost_lm.training.redaction import redact_tree
from tost_lm.training.wandb_files import truncate_runs


class WandbSink:
    """One wandb run for all launches, with no step twice.

    Offline, the files of earlier launches are truncated to the kept rows, and this launch writes the missing rows to a
    new file. `wandb sync` merges all files of a run id into one run. Online, only steps after wandb's last one are
    logged. A thread logs the rows, so a slow or hung wandb does not delay training.
    """

    def __init__(
        self, config: PretrainConfig, run_id: str, kept: Mapping[int, Row], warn: Callable[[str], None]
    ) -> None:
        """
        Args:
            run_id: of the run to resume; empty: a new run.
            kept: the values of earlier launches, by step.
            warn: called with a line if wandb fails; training continues without it.

        Raises:
            ConfigError: wandb does not start in the mode that WANDB_MODE names.
        """
        self.run_id, self._warn, self._failure = run_id or uuid.uuid4().hex, warn, ""
        last_in_files = truncate_runs(config.run_folder / "wandb", self.run_id, max(kept, default=0))
        self._run, self._close_s = _start(config, self.run_id), config.run.timeouts.close
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        for step, row in kept.items():
            if not self._run.offline or step > last_in_files:
                self._rows.put(row)
        self._thread = threading.Thread(target=self._log_rows, name="wandb rows", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        """Log the values of a step; wandb merges those of equal steps."""
        if not self._failure:
            self._rows.put(row)
        self._warn_of_failure()

    def close(self) -> None:
        """Wait up to `Timeouts.close` until all rows are logged, and end wandb's process."""
        import wandb

        self._rows.put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self._failure = f"it did not finish within {self._close_s:.0f} s"
        else:
            try:
                wandb.teardown()  # wandb would do it at exit, with a traceback if its process was killed
            except Exception as error:
                self._failure = self._failure or _first_line(error)
        self._warn_of_failure()

    def _log_rows(self) -> None:
        try:
            while row := self._rows.get():
                if row["step"] >= self._run.step:  # online, wandb already has earlier steps
                    values = {name: value for name, value in row.items() if value is not None}
                    self._run.log(values, step=row["step"])
            self._run.finish()
        except Exception as error:  # any error: wandb's process was killed, its disk is full, …
            self._failure = _first_line(error)

    def _warn_of_failure(self) -> None:
        if self._failure:
            self._warn(
                f"wandb failed ({self._failure}); metrics.jsonl continues, and the next launch logs the missing rows"
            )
            self._warn = lambda line: None


def _mode() -> str:
    return os.environ.get("WANDB_MODE", "offline")


def _start(config: PretrainConfig, run_id: str) -> Any:
    import wandb

    try:
        return wandb.init(
            project="tost_lm",
            name=config.run.name,
            id=run_id,
            resume="allow",
            dir=config.run_folder,
            mode=_mode(),  # pyright: ignore[reportArgumentType]
            config=redact_tree(config.model_dump(mode="json")),
            # wandb's metadata would have the unredacted command line and repository address.
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True, disable_git=True),
        )
    except (wandb.Error, ValueError) as error:
        raise ConfigError(
            f"WANDB_MODE={_mode()}: {_first_line(error)}; set WANDB_MODE to offline or disabled"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
