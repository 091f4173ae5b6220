"""Pre-train a language model.

    tost train configs/pretrain/demo.toml launch.ranks=2
    tost train configs/pretrain/demo.toml launch.ranks=1 run.timeout_seconds=86400      (one process, for a debugger)
    tost train CONFIG run.name=NEW train.branch_from=runs/trunk/checkpoints/step_00001000      (a branch)
    torchrun --nnodes N … -m tost_lm.pretrain.commands.train CONFIG      (several nodes)

Input: shard folders. Output: runs/NAME (run.folder, run.name) with config.toml, env.json, log.txt, metrics.jsonl,
validation.jsonl, evaluations.jsonl, events.jsonl, heartbeats/, wandb/, tensorboard/ (with run.loggers)
and checkpoints/. A run with a checkpoint resumes from the newest valid one. SIGTERM, SIGUSR1, a first
Ctrl-C and the end of run.max_minutes request a graceful stop: all ranks save a checkpoint after the current micro-batch
and exit with 75. A second Ctrl-C ends at once. Each of the [[stages]] of a run ends with a checkpoint and starts in new
processes; ranks of torchrun exit with 76, and the same command goes on.
"""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tost_lm.checkpointing.format import Progress, read_model_config
from tost_lm.config import EXIT_STOPPED, ignore_output_errors, run_program
from tost_lm.errors import ConfigError, install_hint
from tost_lm.parallel.launch import end_for_next_stage, ranks_of_launch, start_ranks
from tost_lm.pretrain.loggers import loggers_in_use
from tost_lm.pretrain.settings import PretrainConfig

if TYPE_CHECKING:
    from tost_lm.checkpointing.uploads import Uploads
    from tost_lm.data.loader import Corpora
    from tost_lm.parallel.graceful_stop import GracefulStop
    from tost_lm.pretrain.start import StartPoint
    from tost_lm.tasks.in_training import TasksInTraining


def main(path: Path, config: PretrainConfig) -> None:
    ignore_output_errors()  # log.txt has the lines
    model_ranks = max(stage.config.parallel.model_ranks for stage in config.in_stages())
    ranks = ranks_of_launch(model_ranks, config.launch, config.run.device)
    for stage in config.in_stages():
        stage.config.accumulation(ranks)  # reports a bad batch size before anything is loaded
    for package in ["deepspeed", "psutil", *loggers_in_use(config.run)]:
        if not find_spec(package):
            extra = "tensorboard" if package == "tensorboard" else "train"
            raise ConfigError(f"training needs {package}; {install_hint(extra)}")
    start_ranks("train", ranks)
    from tost_lm.parallel.graceful_stop import GracefulStop

    graceful_stop = GracefulStop(config.run.max_minutes)
    graceful_stop.install_handlers()
    from tost_lm.checkpointing.uploads import open_uploads
    from tost_lm.pretrain.folder import NEXT_STAGE

    upload, is_first = config.upload_folder, os.environ.get("RANK", "0") == "0"
    with open_uploads(upload, config.run_folder) if upload and is_first else nullcontext() as uploads:
        reason = _train(config, graceful_stop, uploads, print if is_first else lambda line: None)
    if reason == NEXT_STAGE:
        end_for_next_stage("train")
    if reason:
        sys.exit(EXIT_STOPPED)


def _train(
    config: PretrainConfig, graceful_stop: "GracefulStop", uploads: "Uploads | None", log: Callable[[str], None]
) -> str:
    """Train the stage that the run is in. Returns why it ended, as `tost_lm.pretrain.train.train`."""
    from tost_lm.checkpointing.uploads import fetch_newest
    from tost_lm.pretrain.start import find_start, require_same_run  # imports torch, which takes seconds
    from tost_lm.pretrain.step import check_vocabulary

    if upload := config.upload_folder:
        require_same_run(upload, config.run_folder)
        fetch_newest(upload, config.run_folder, config.train.rewind, log)
    start = find_start(config, log)
    if _is_done(start):  # no engine will read and hash the shards
        start = find_start(config, log, hash_shards=True)
    stage = start.stage.config
    if start.resume_from and _is_done(start):
        progress = Progress.read(start.resume_from)
        progress.require_finite_validation(stage.train.steps, stage.run_folder)
        early = ": validation.stop_after has ended the run" if stage.stops_early(progress) else ""
        if uploads:
            uploads.start(start.resume_from, stage.checkpoint)  # those of a launch that was killed meanwhile
            uploads.finish()
        log(f"reusing {start.resume_from}: nothing is left to train up to step {stage.last_step}{early}")
        return ""
    if start.weights_from:
        stage = stage.with_context_of(read_model_config(start.weights_from))
        start = start._replace(stage=start.stage._replace(config=stage))
    check_vocabulary(stage, start.corpora)
    evaluation = find_evaluation(stage, start.corpora)
    from tost_lm.pretrain.train import train

    return train(config, start, graceful_stop, evaluation, uploads)


def _is_done(start: "StartPoint") -> bool:
    if start.resume_from is None:
        return False
    progress, config = Progress.read(start.resume_from), start.stage.config
    begins = len(progress.stages) < len(start.records)
    return progress.step >= config.last_step or (not begins and config.stops_early(progress))


def find_evaluation(config: PretrainConfig, corpora: "Corpora") -> "TasksInTraining | None":
    """The evaluation during training. Raises ConfigError or DataError, as `TasksInTraining.find`."""
    settings = config.evaluation
    if settings.interval is None:
        return None
    from tost_lm.tasks.in_training import TasksInTraining

    tokenizer, shards = corpora.tokenizer(), corpora.shards[0]
    return TasksInTraining.find(settings.tasks, settings.sets, settings.settings, tokenizer, shards, config.model)


def run() -> NoReturn:
    run_program(main, name="tost train", doc=__doc__ or "", positional="CONFIG", config=PretrainConfig)


if __name__ == "__main__":
    run()
