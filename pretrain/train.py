"""Pre-train a language model.

    torchrun --standalone --nproc-per-node 2 -m pretrain.train configs/pretrain/demo.toml
    python -m pretrain.train configs/pretrain/demo.toml run.name=debug      (one process, for a debugger)

Reads shard folders, writes runs/NAME: config.toml, env.json, log.txt, metrics.jsonl, validation.jsonl,
evaluations.jsonl, events.jsonl, heartbeats/, wandb/ (offline unless WANDB_MODE says otherwise) and checkpoints/. A run
that has a checkpoint goes on from the newest valid one. On SIGTERM, SIGUSR1 and before run.max_minutes are over the
ranks save and exit with 75.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.training.config import PretrainConfig
from tost_lm.training.progress import Progress
from tost_lm.training.run_folder import claim_run_folder

if TYPE_CHECKING:
    from tost_lm.data.mixture import Corpora
    from tost_lm.training.hooks import Evaluation


def main(path: Path, config: PretrainConfig) -> None:
    config.accumulation(int(os.environ.get("WORLD_SIZE", "1")))  # says what is wrong before anything is loaded
    wandb = [] if os.environ.get("WANDB_MODE") == "disabled" else ["wandb"]
    for package in ["deepspeed", "psutil", *wandb]:
        if not find_spec(package):
            raise ConfigError(f"training needs {package}: pip install 'tost-lm[train]'")
    from tost_lm.data.mixture import Corpora
    from tost_lm.training.departure import Departure, leave
    from tost_lm.training.initial_weights import find_initial_weights

    departure = Departure(config.run.max_minutes)
    departure.listen()
    corpora = Corpora.open(config.data.folders)
    say = print if os.environ.get("RANK", "0") == "0" else lambda line: None
    claim = claim_run_folder(config, corpora.fingerprint, say)
    if claim.resume_from and Progress.read(claim.resume_from).step >= config.last_step:
        say(f"reusing {claim.resume_from}: nothing is left to train up to step {config.last_step}")
        return
    check_vocabulary(config, corpora)
    evaluation = find_evaluation(config, corpora)
    if claim.resume_from is None:
        claim = claim._replace(initial_weights=find_initial_weights(config, corpora, say))
    from tost_lm.training.loop import train

    if train(config, corpora, claim, departure, evaluation):
        leave()


def check_vocabulary(config: PretrainConfig, corpora: "Corpora") -> None:
    """Raises ConfigError when the shards hold tokens that the model has no embedding for."""
    if corpora.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {corpora.vocab_size} pieces: "
            f"set model.vocab_size to at least {corpora.vocab_size}"
        )


def find_evaluation(config: PretrainConfig, corpora: "Corpora") -> "Evaluation | None":
    """What is measured in the course of training. Raises ConfigError or DataError, as `ProtocolsInTraining.find`."""
    settings = config.evaluation
    if settings.every is None:
        return None
    from tost_lm.evaluation.in_training import ProtocolsInTraining

    return ProtocolsInTraining.find(
        settings.protocols, settings.sets, corpora.tokenizer(), config.model.max_positions, settings.batch_tokens
    )


if __name__ == "__main__":
    run_program(main, name="pretrain.train", doc=__doc__ or "", takes="CONFIG", config=PretrainConfig)
