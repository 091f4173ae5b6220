"""Pre-train a language model.

    tost train configs/pretrain/demo.toml
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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tost_lm.checkpointing.format import Progress, read_model_config
from tost_lm.command_line import EXIT_STOPPED, ignore_output_errors, run_program
from tost_lm.errors import ConfigError, install_hint
from tost_lm.parallel.launch import end_for_next_stage, start_ranks
from tost_lm.pretrain.loggers import logger_of
from tost_lm.pretrain.settings import PretrainConfig, longer_batches

if TYPE_CHECKING:
    from tost_lm.parallel.graceful_stop import GracefulStop
    from tost_lm.pretrain.stage_run import StageRun


def main(path: Path, config: PretrainConfig) -> None:
    ignore_output_errors()  # log.txt has the lines
    from tost_lm.pretrain.checks import ranks_to_start  # imports NumPy

    ranks = ranks_to_start(config)
    loggers = {logger.package: logger.extra for logger in map(logger_of, config.run.loggers) if logger.is_on()}
    needed = {"psutil": "train", **loggers}
    if config.parallel.engine == "deepspeed":
        needed["deepspeed"] = "deepspeed"
    if config.parallel.tensor > 1:
        needed["megatron"] = "megatron"
    for package, extra in needed.items():
        if package and not find_spec(package):
            raise ConfigError(f"training needs {package}; {install_hint(extra)}")
    start_ranks("train", ranks)
    from tost_lm.parallel.graceful_stop import GracefulStop

    graceful_stop = GracefulStop(config.run.max_minutes)
    graceful_stop.install_handlers()
    from tost_lm.pretrain.folder import NEXT_STAGE

    is_first = os.environ.get("RANK", "0") == "0"
    for warning in longer_batches(path, config) if is_first else ():
        print(f"warning: {warning}", flush=True)
    reason = _train(config, graceful_stop, print if is_first else lambda line: None)
    if reason == NEXT_STAGE:
        end_for_next_stage("train")
    if reason:
        sys.exit(EXIT_STOPPED)


def _train(config: PretrainConfig, graceful_stop: "GracefulStop", log: Callable[[str], None]) -> str:
    """Train the stage that the run is in. Returns why it ended, as `tost_lm.pretrain.train.train`."""
    from tost_lm.checkpointing.run_lock import run_lock
    from tost_lm.checkpointing.uploads import Uploads, fetch_newest
    from tost_lm.pretrain.checks import check_stages
    from tost_lm.pretrain.start import find_start, require_same_run  # imports torch, which takes seconds

    if upload := config.upload_folder:
        require_same_run(upload, config.run_folder)
        fetch_newest(upload, config.run_folder, log)
    start = find_start(config, log)
    if _is_done(start):  # no engine will read and hash the shards
        start = find_start(config, log, hash_shards=True)
    start = start.with_config(start.config.on_ranks(int(os.environ.get("WORLD_SIZE", "1"))))
    stage = start.config
    if start.resume_from and _is_done(start):
        progress = Progress.read(start.resume_from)
        progress.require_finite_validation(stage.train.steps, stage.run_folder)
        if upload and os.environ.get("RANK", "0") == "0":
            with run_lock(stage.run_folder, rank=0):
                uploads = Uploads(upload, stage.run_folder)
                uploads.start(start.resume_from, stage.checkpoint)  # those of a launch that was killed meanwhile
                uploads.finish()
        log(f"reusing {start.resume_from}: nothing is left to train up to step {stage.last_step}")
        return ""
    if start.weights_from:
        start = start.with_config(stage.with_context_of(read_model_config(start.weights_from)))
    later = [one for one in config.in_stages() if one.first_step >= stage.train.steps]
    evaluation = check_stages([start.stage, *later])
    from tost_lm.pretrain.train import train

    return train(start, graceful_stop, evaluation)


def _is_done(start: "StageRun") -> bool:
    return start.resume_from is not None and Progress.read(start.resume_from).step >= start.config.last_step


def run() -> NoReturn:
    run_program(main, name="tost train", doc=__doc__ or "", positional="CONFIG", config=PretrainConfig)


if __name__ == "__main__":
    run()
