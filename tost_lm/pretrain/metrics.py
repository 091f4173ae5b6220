"""Records of a run, all by rank 0: settings and environment of each launch, log lines, rows of metrics, validation,
evaluations and events, other loggers.
"""

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch

from tost_lm.checkpointing.format import SETTINGS, Progress
from tost_lm.checkpointing.run_folder import COLUMNS, ENVIRONMENT, HEARTBEATS, read_record
from tost_lm.config import to_toml
from tost_lm.data.stages import phases, tokens_of
from tost_lm.errors import TrainingError
from tost_lm.files import regular_file, write_atomically, write_rows
from tost_lm.markdown import format_result
from tost_lm.model.flops import peak_flops
from tost_lm.parallel.agreement import rank_numbers
from tost_lm.parallel.watchdog import read_heartbeats
from tost_lm.pretrain.loggers import GuardedLogger, LoggedLaunch, Row, logger_of
from tost_lm.pretrain.rank_times import STRAGGLES, Slowest, slowest
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.redaction import redact_command, redact_tree
from tost_lm.version import VERSION, git_commit

PACKAGES = ["torch", "deepspeed", "megatron-core", "sentencepiece", "numpy", "wandb"]
"""Whose versions are recorded."""
TIME = "%Y-%m-%dT%H:%M:%S%z"
"""Of a launch or an event."""


def write_run_folder(config: PretrainConfig, world_size: int, device: str, planned: Mapping[str, float]) -> None:
    """Record the settings and the environment of this launch, with its plan (`plan.fit.plan_of_run`)."""
    write_atomically(config.run_folder / SETTINGS, to_toml(config))
    environment = {
        "started": time.strftime(TIME),
        "tost_lm": VERSION,
        "commit": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version_of(name) for name in PACKAGES},
        "device": device,
        "cpu_count": os.cpu_count(),
        "world_size": world_size,
        "planned": planned,
        "command": ["tost", "train", *redact_command(sys.argv[1:])],
    }
    write_atomically(config.run_folder / ENVIRONMENT, json.dumps(environment, indent=1))


class Metrics:
    """Opened once the run folder exists; rows of steps after `progress`, which a killed launch wrote, are dropped."""

    def __init__(
        self,
        config: PretrainConfig,
        progress: Progress,
        world_size: int,
        device: torch.device,
        branch: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            progress: of the checkpoint to resume or branch from, or of step 0.
            world_size: ranks, each with a device.
            device: of this rank.
            branch: recorded of the launch that starts a branch; None: of any other.

        Raises:
            ConfigError: a row of an earlier launch is damaged, or a logger refuses its settings.
        """
        self._config, self._world_size, self._device, self._stages = config, world_size, device, progress.stages
        cuda = device.type == "cuda"
        self._peak_flops = peak_flops(torch.cuda.get_device_name(device), config.train.dtype) if cuda else None

        folder, first_step = config.run_folder, progress.step
        kept = {name: drop_rows_after(folder / f"{name}.jsonl", first_step) for name in COLUMNS}
        self._records = {name: regular_file(folder / f"{name}.jsonl").open("a") for name in COLUMNS}
        self._log = regular_file(folder / "log.txt").open("a")
        self.wandb_run_id = progress.wandb_run_id
        """Stored in checkpoints, so that all launches of a run are one wandb run; empty without wandb."""
        tree = redact_tree(config.model_dump(mode="json"))
        launch = LoggedLaunch(folder, config.run.name, first_step, self.wandb_run_id, tree, config.run.timeouts.close)
        own = config.run.logger_settings
        self._loggers = [
            GuardedLogger(name, launch, own.get(Path(name).stem, {}), self.log)
            for name in config.run.loggers
            if logger_of(name).is_on()
        ]
        self.wandb_run_id = next((one.run_id for one in self._loggers if one.run_id), self.wandb_run_id)

        last = kept["metrics"][-1] if kept["metrics"] else {"seconds": 0.0}
        self._last_step, self._last_time = first_step, time.perf_counter()
        self._started = self._last_time - last["seconds"]
        self._paused_in_window = self._paused = self._trained = 0.0
        self._straggler: tuple[int | None, int] = None, 0
        """Its rank, and the number of rows in a row that have it."""
        self._trained_before = last.get("step_seconds", last["seconds"])
        first = kept["events"][0]["time"] if kept["events"] else time.strftime(TIME)
        self._first_launch = datetime.strptime(first, TIME).timestamp()
        kind = "branched" if branch else "resumed" if first_step else "started"
        self.event(first_step, kind, ranks=world_size, **(branch or {}))

    def log(self, text: str) -> None:
        """Print a text, and append it to log.txt with the time in front of each line."""
        print(text, flush=True)
        with _explain_write_errors(self._log):
            for line in text.splitlines():
                print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=self._log)
            self._log.flush()

    def step(self, step: int, values: Mapping[str, float], flops: float, seconds: Sequence[float] = ()) -> None:
        """Record the state after `step` steps: `loss`, `lr`, `grad_norm` and other numbers by name, and rates, which
        cover the steps since the last record, without pauses. Name a straggler in its second record in a row.

        Args:
            flops: of these steps on all devices.
            seconds: sums over ranks of `RankTimes.take`.
        """
        now, batch_tokens = time.perf_counter(), self._config.batch_tokens
        trained = now - self._last_time - self._paused_in_window
        tokens_per_second = (step - self._last_step) * batch_tokens / trained
        each = tokens_per_second / self._world_size
        rate = flops / trained / self._world_size
        self._paused, self._trained = self._paused + self._paused_in_window, self._trained + trained
        in_steps = self._trained_before + self._trained
        last = slowest(seconds)
        row = {
            "step": step,
            **values,
            "tokens": tokens_of(self._stages, step),
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_device": each,
            "mfu": rate / self._peak_flops if self._peak_flops else None,
            "tflops_device": rate / 1e12,
            "memory_peak_bytes": _memory_peak(self._device),
            "seconds": now - self._started,
            "step_seconds": in_steps,
            "goodput": in_steps / max(time.time() - self._first_launch, in_steps),
            "data_wait": max(seconds[::2], default=0.0) / trained,
            **({"slowest_rank": last.rank, "slowest_over_median": last.over_median} if last else {}),
        }
        self._send(_append(self._records["metrics"], row))
        pauses = 1 + self._paused / self._trained
        eta = timedelta(seconds=round((self._config.train.steps - step) * batch_tokens / tokens_per_second * pauses))
        forms = {"loss": ".4f", "lr": ".1e", "grad_norm": ".3f"}
        shown = (f"{name.replace('_', ' ')} {value:{forms.get(name, '.2e')}}" for name, value in values.items())
        self.log(
            f"step {step}/{self._config.train.steps}  {'  '.join(shown)}  {each:,.0f} tokens/s/device  "
            f"{self._use_of_device(row)}  ETA {eta}"
        )
        straggler = last.rank if last and last.over_median >= STRAGGLES else None
        self._straggler = straggler, self._straggler[1] + 1 if straggler == self._straggler[0] else 1
        if last and self._straggler == (last.rank, 2):
            self._name_straggler(step, last)
        self._last_step, self._last_time, self._paused_in_window = step, now, 0.0

    def validation(self, row: dict[str, Any]) -> None:
        """Record a validation: step, loss (nats per token), position_ends, loss_by_position and other values."""
        self._send(_validation_values(_append(self._records["validation"], row)))
        loss, perplexity = row["loss"], float(torch.tensor(row["loss"], dtype=torch.float64).exp())  # perhaps inf
        steps = f"{row['step']}/{self._config.train.steps}"
        self.log(f"step {steps}  validation loss {loss:.4f}  perplexity {perplexity:,.2f}")
        for name, of_corpus in row.get("loss_by_corpus", {}).items():
            self.log(f"step {steps}  validation loss {'none' if of_corpus is None else f'{of_corpus:.4f}'}  {name}")

    def evaluation(self, row: dict[str, Any]) -> None:
        """Record an evaluation: step, protocol (the task), headline (the metric that is logged), and the metrics, also
        the standard error of the headline if it has one."""
        self._send(_evaluation_values(_append(self._records["evaluations"], row)))
        headline = row["headline"]
        self.log(
            f"step {row['step']}/{self._config.train.steps}  {row['protocol']}  {headline.replace('_', ' ')} "
            f"{format_result(headline, row)}"
        )

    def skipped(self, step: int, reason: str) -> None:
        """Record that step `step` was not applied."""
        sequences = self._config.train.global_batch_size
        end = phases(self._stages, step)[-1][1]
        samples = [end - sequences, end - 1]
        self.log(f"step {step} skipped: {reason}; samples {samples[0]}-{samples[1]}")
        self.event(step, "skipped", why=reason, samples=samples)

    def event(self, step: int, kind: str, **fields: Any) -> None:
        """Record an event, such as a skipped step or a resume."""
        _append(self._records["events"], {"step": step, "event": kind, "time": time.strftime(TIME), **fields})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is part of the run but not of its throughput."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self._paused_in_window += time.perf_counter() - since

    def close(self) -> None:
        """Wait until the loggers have every row, and close the files."""
        for logger in self._loggers:
            logger.close()
        for file in (*self._records.values(), self._log):
            file.close()

    def _send(self, values: Row) -> None:
        for logger in self._loggers:
            logger.log(values)

    def _name_straggler(self, step: int, slowest: Slowest) -> None:
        """Tensor ranks wait for each other, so each of them may be it."""
        size, since, last = self._config.parallel.tensor, step - self._last_step, self._config.train.steps
        first = slowest.rank // size * size
        name = f"{'ranks' if size > 1 else 'rank'} {rank_numbers(range(first, first + size))}"
        if beat := read_heartbeats(self._config.run_folder / HEARTBEATS).get(slowest.rank):
            name = f"{name} ({beat.host})"
        computed, waited = (seconds / since for seconds in (slowest.computed_s, slowest.waited_s))
        self.log(
            f"step {step}/{last}  straggler: {name}, {slowest.over_median:.2f} times as slow as the median rank; "
            f"a step has {computed:.3f} s of forwards and {waited:.3f} s of waits for data"
        )

    def _use_of_device(self, row: dict[str, Any]) -> str:
        text = f"{row['tflops_device']:.3g} TFLOP/s" if row["mfu"] is None else f"MFU {100 * row['mfu']:.1f} %"
        return f"{text}  HBM {row['memory_peak_bytes'] / 1e9:.1f} GB" if self._device.type == "cuda" else text


class NullMetrics:
    """The metrics of ranks other than 0: nothing is recorded."""

    wandb_run_id = ""
    paused = nullcontext

    def __getattr__(self, record: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _validation_values(row: Row) -> Row:
    """The values of a row of validation.jsonl, for loggers."""
    losses = zip(row["position_ends"], row["loss_by_position"], strict=True)
    by_position = {f"validation/loss_by_position/{end}": loss for end, loss in losses}
    by_corpus = {f"validation/loss_by_corpus/{name}": loss for name, loss in row.get("loss_by_corpus", {}).items()}
    return {"step": row["step"], "validation/loss": row["loss"], **by_position, **by_corpus}


def _evaluation_values(row: Row) -> Row:
    """The headline of a row of evaluations.jsonl."""
    headline = row["headline"]
    return {"step": row["step"], f"evaluation/{row['protocol']}/{headline}": row[headline]}


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def drop_rows_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep the rows of a JSONL file up to `step`, so that a resumed run records no step twice; returns them.

    Raises ConfigError as `read_record`.
    """
    kept = [row for row in read_record(path) if row["step"] <= step]
    write_rows(path, kept)
    return kept


def _append(file: TextIO, row: dict[str, Any]) -> dict[str, Any]:
    """Append a row, and return it as JSON reads it back: NaN and infinity become null."""
    recorded = json.loads(json.dumps(row), parse_constant=lambda name: None)
    with _explain_write_errors(file):
        file.write(json.dumps(recorded, ensure_ascii=False) + "\n")
        file.flush()
    return recorded


@contextmanager
def _explain_write_errors(file: TextIO) -> Iterator[None]:
    """Raises TrainingError when a line cannot be written."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{file.name}: cannot be written: {error.strerror}; fix that and run the same command to resume from the "
            "newest complete checkpoint"
        ) from None


def _memory_peak(device: torch.device) -> int:
    """Peak memory in bytes: on a GPU of tensors since the last call, else of this process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
