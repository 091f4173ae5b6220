"""wandb and TensorBoard. The JSONL files are the reference; loggers get the rows that a launch adds to them."""

import json
import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tost_lm.errors import ConfigError, first_line
from tost_lm.pretrain.sections import RunConfig
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.redaction import redact_tree

Row = Mapping[str, Any]
"""Values by name, with `step`; a value may be None."""


def loggers_in_use(run: RunConfig) -> list[str]:
    """`run.loggers`, without wandb if WANDB_MODE disables it."""
    return [name for name in run.loggers if name != "wandb" or _wandb_mode() != "disabled"]


def validation_values(row: Row) -> Row:
    """The values of a row of validation.jsonl."""
    losses = zip(row["position_ends"], row["loss_by_position"], strict=True)
    by_position = {f"validation/loss_by_position/{end}": loss for end, loss in losses}
    by_corpus = {f"validation/loss_by_corpus/{name}": loss for name, loss in row.get("loss_by_corpus", {}).items()}
    return {"step": row["step"], "validation/loss": row["loss"], **by_position, **by_corpus}


def evaluation_values(row: Row) -> Row:
    """The headline of a row of evaluations.jsonl."""
    headline = row["headline"]
    return {"step": row["step"], f"evaluation/{row['protocol']}/{headline}": row[headline]}


class TensorBoardSink:
    """Event files of all launches in tensorboard/, of which TensorBoard shows each step once.

    The file of a launch tells TensorBoard to hide the later steps of earlier launches.
    """

    def __init__(self, config: PretrainConfig, first_step: int, warn: Callable[[str], None]) -> None:
        """
        Args:
            first_step: steps before this launch.
            warn: called with a line if TensorBoard fails; training continues without it.
        """
        self._warn, self._failed, self._writer = warn, False, None
        self._run(lambda: self._open(config, first_step))

    def log(self, row: Row) -> None:
        """Log the values of a step and write them to disk."""
        self._run(lambda: self._add(row))

    def close(self) -> None:
        """Close the event file."""
        self._run(lambda: self._writer.close())

    def _open(self, config: PretrainConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(config.run_folder / "tensorboard", purge_step=first_step + 1)
        settings = json.dumps(redact_tree(config.model_dump(mode="json")), indent=1)
        self._writer.add_text("settings", f"```\n{settings}\n```", first_step)

    def _add(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def _run(self, action: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # any error of its writing thread
            self._failed = True
            self._warn(f"TensorBoard failed ({error}); metrics.jsonl continues")


class WandbSink:
    """One wandb run for all launches.

    Offline, each launch has a file, and `wandb sync` merges all files of a run id into one run. Where a launch repeats
    steps that a killed one had logged, both are in the files, and wandb keeps one. Online, only steps after
    wandb's last one are logged. A thread logs the rows, so a slow or hung wandb does not delay training.
    """

    def __init__(self, config: PretrainConfig, run_id: str, warn: Callable[[str], None]) -> None:
        """
        Args:
            run_id: of the run to resume; empty: a new run.
            warn: called with a line if wandb fails; training continues without it.

        Raises:
            ConfigError: wandb refuses the mode of WANDB_MODE.
        """
        self.run_id, self._warn, self._failure = run_id or uuid.uuid4().hex, warn, ""
        self._run, self._close_s = None, config.run.timeouts.close
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._log_rows, name="wandb rows", daemon=True)
        try:
            self._run = _start(config, self.run_id)
        except ConfigError:
            raise
        except Exception as error:  # any error, for example without a home directory
            self._failure = first_line(error)
        self._thread.start()
        self._warn_of_failure()

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
                self._failure = self._failure or first_line(error)
        self._warn_of_failure()

    def _log_rows(self) -> None:
        try:
            while self._run and (row := self._rows.get()):
                if row["step"] >= self._run.step:  # online, wandb already has earlier steps
                    values = {name: value for name, value in row.items() if value is not None}
                    self._run.log(values, step=row["step"])
            if self._run:
                self._run.finish()
        except Exception as error:  # any error: wandb's process was killed, its disk is full, …
            self._failure = first_line(error)

    def _warn_of_failure(self) -> None:
        if self._failure:
            self._warn(f"wandb failed ({self._failure}); metrics.jsonl continues")
            self._warn = lambda line: None


def _wandb_mode() -> str:
    return os.environ.get("WANDB_MODE", "offline")


def _start(config: PretrainConfig, run_id: str) -> Any:
    import wandb

    mode = _wandb_mode()
    try:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tost_lm"),
            name=config.run.name,
            id=run_id,
            resume="allow",
            dir=config.run_folder,
            mode=mode,  # pyright: ignore[reportArgumentType]
            config=redact_tree(config.model_dump(mode="json")),
            # wandb's metadata would have the unredacted command line and repository address.
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True, disable_git=True),
        )
    except (wandb.Error, ValueError) as error:
        raise ConfigError(
            f"WANDB_MODE={mode}: {first_line(error)}; set it to offline, or leave wandb out of run.loggers"
        ) from None
