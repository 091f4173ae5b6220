"""A run in wandb. The JSONL files are the truth; what wandb holds is made from them."""

import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tost_lm.errors import ConfigError
from tost_lm.training.config import PretrainConfig
from tost_lm.training.redaction import redact_tree
from tost_lm.training.wandb_files import cut_back

Row = Mapping[str, Any]
CLOSE_S = 60.0  # what wandb may take in the end: the other ranks wait, and so may a job's limit


class WandbSink:
    """One wandb run, however often it was resumed, and no step twice in it.

    Offline, the files of earlier launches are cut back to the rows that were kept, and a file of this launch goes on
    with what is missing; `wandb sync` takes all of a run id as one run. Online, wandb knows its last step and goes on
    after it. Rows are logged by a thread of their own: a wandb that is slow or stuck does not hold up training.
    """

    def __init__(
        self,
        config: PretrainConfig,
        run_id: str,
        metrics: Sequence[Row],
        validation: Sequence[Row],
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            run_id: that of the run that goes on; empty: a new one.
            metrics, validation: the kept rows of earlier launches, by step.
            warn: takes the line that says that wandb was lost; training goes on without it.

        Raises:
            ConfigError: wandb does not start in the mode that WANDB_MODE names.
        """
        self.run_id, self._warn, self._failure = run_id or uuid.uuid4().hex, warn, ""
        kept = _by_step(metrics, validation)
        last_in_files = cut_back(config.run_folder / "wandb", self.run_id, max(kept, default=0))
        self._run = _start(config, self.run_id)
        self._rows: queue.SimpleQueue[tuple[int, Row] | None] = queue.SimpleQueue()
        for step, values in kept.items():
            if not self._run.offline or step > last_in_files:
                self._rows.put((step, values))
        self._thread = threading.Thread(target=self._log_rows, name="wandb rows", daemon=True)
        self._thread.start()

    def metrics(self, row: Row) -> None:
        """Log a row of metrics.jsonl."""
        self._put(row["step"], row)

    def validation(self, row: Row) -> None:
        """Log a row of validation.jsonl; wandb shows it in one with the metrics of its step."""
        self._put(row["step"], _validation_values(row))

    def close(self) -> None:
        """Wait until everything is logged, up to CLOSE_S; wandb's process ends."""
        import wandb

        self._rows.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._failure = f"it did not finish within {CLOSE_S:.0f} s"
        else:
            try:
                wandb.teardown()  # else at exit, with a traceback when its process is gone
            except Exception as error:
                self._failure = self._failure or _first_line(error)
        self._tell_of_failure()

    def _put(self, step: int, values: Row) -> None:
        if not self._failure:
            self._rows.put((step, values))
        self._tell_of_failure()

    def _log_rows(self) -> None:
        try:
            while item := self._rows.get():
                step, values = item
                if step >= self._run.step:  # online, wandb has the others
                    self._run.log({name: value for name, value in values.items() if value is not None}, step=step)
            self._run.finish()
        except Exception as error:  # of any kind: its process was killed, its disk is full, …
            self._failure = _first_line(error)

    def _tell_of_failure(self) -> None:
        if self._failure:
            self._warn(
                f"wandb was lost ({self._failure}); metrics.jsonl goes on, and the next launch logs its rows anew"
            )
            self._warn = lambda line: None


def open_wandb(
    config: PretrainConfig,
    run_id: str,
    metrics: Sequence[Row],
    validation: Sequence[Row],
    warn: Callable[[str], None],
) -> WandbSink | None:
    """As WandbSink; None, and wandb is not even imported, with WANDB_MODE=disabled."""
    return None if _mode() == "disabled" else WandbSink(config, run_id, metrics, validation, warn)


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
            # Its metadata would hold the command line and the repository's address in clear: env.json has them.
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True, disable_git=True),
        )
    except (wandb.Error, ValueError) as error:
        raise ConfigError(
            f"WANDB_MODE={_mode()}: {_first_line(error)}; set WANDB_MODE to offline or disabled"
        ) from None


def _by_step(metrics: Sequence[Row], validation: Sequence[Row]) -> dict[int, Row]:
    rows: dict[int, Row] = {row["step"]: row for row in metrics}
    for row in validation:
        rows[row["step"]] = {**rows.get(row["step"], {}), **_validation_values(row)}
    return dict(sorted(rows.items()))


def _validation_values(row: Row) -> Row:
    losses = zip(row["position_ends"], row["loss_by_position"], strict=True)
    return {
        "validation/loss": row["loss"],
        **{f"validation/loss_by_position/{end}": loss for end, loss in losses},
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
