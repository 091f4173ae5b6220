"""What a run tells of itself: a progress line, a row of metrics.jsonl and wandb, all by rank 0."""

import json
import os
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

from tost_lm.errors import ConfigError
from tost_lm.files import write_whole
from tost_lm.training.config import PretrainConfig
from tost_lm.training.run_folder import drop_metrics_after


class Metrics:
    """Opened at the step that the run goes on from; rows of later steps, left by a killed run, are dropped."""

    def __init__(self, config: PretrainConfig, first_step: int):
        self.config = config
        folder = config.run_folder
        seconds = drop_metrics_after(folder / "metrics.jsonl", first_step)
        self._rows = (folder / "metrics.jsonl").open("a")
        self._log = (folder / "log.txt").open("a")
        self._wandb = _start_wandb(config)
        self._started = time.perf_counter() - seconds
        self._last_step, self._last_time = first_step, time.perf_counter()

    def say(self, line: str) -> None:
        """Print a line and keep it in log.txt."""
        print(line, flush=True)
        print(line, file=self._log, flush=True)

    def step(self, step: int, loss: float, lr: float, grad_norm: float) -> None:
        """Record the state after `step` steps; rates are over the steps since the last record."""
        now = time.perf_counter()
        tokens_per_second = (step - self._last_step) * self.config.batch_tokens / (now - self._last_time)
        row = {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": step * self.config.batch_tokens,
            "tokens_per_second": tokens_per_second,
            "seconds": now - self._started,
        }
        self._rows.write(json.dumps(row) + "\n")
        self._rows.flush()
        if self._wandb:
            self._wandb.log(row, step=step)
        eta = timedelta(seconds=round((self.config.train.steps - step) * self.config.batch_tokens / tokens_per_second))
        self.say(
            f"step {step}/{self.config.train.steps}  loss {loss:.4f}  lr {lr:.2e}  grad norm {grad_norm:.3f}  "
            f"{tokens_per_second:,.0f} tokens/s  ETA {eta}"
        )
        self._last_step, self._last_time = step, now

    def close(self) -> None:
        self._rows.close()
        self._log.close()
        if self._wandb:
            self._wandb.finish()


def _start_wandb(config: PretrainConfig) -> Any:
    """A wandb run inside the run folder, offline unless WANDB_MODE says otherwise; None when it is disabled."""
    mode = os.environ.get("WANDB_MODE", "offline")
    if mode == "disabled":
        return None
    import wandb

    try:
        return wandb.init(
            project="tost_lm",
            name=config.run.name,
            id=_wandb_id(config.run_folder / "wandb" / "run_id.txt"),
            resume="allow",
            dir=config.run_folder,
            mode=mode,  # pyright: ignore[reportArgumentType]
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except (wandb.Error, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"WANDB_MODE={mode}: {reason}; set WANDB_MODE to offline or disabled") from None


def _wandb_id(path: Path) -> str:
    """One id for all launches of a run, so that wandb shows them as one."""
    if not path.exists():
        write_whole(path, uuid.uuid4().hex)
    return path.read_text()


class Silence:
    """What ranks other than 0 record: nothing."""

    def say(self, line: str) -> None: ...
    def step(self, step: int, loss: float, lr: float, grad_norm: float) -> None: ...
    def close(self) -> None: ...
