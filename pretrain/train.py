"""Pre-train a language model.

    torchrun --standalone --nproc-per-node 2 -m pretrain.train configs/pretrain/demo.toml
    python -m pretrain.train configs/pretrain/demo.toml run.name=debug      (one process, for a debugger)

Reads shard folders, writes runs/NAME: config.toml, env.json, log.txt, metrics.jsonl, wandb/ (offline unless
WANDB_MODE says otherwise) and checkpoints/. A run that has a checkpoint goes on from the newest valid one.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.training.config import PretrainConfig
from tost_lm.training.run_folder import claim_run_folder, steps_behind

if TYPE_CHECKING:
    from tost_lm.data.mixture import Corpora

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def main(path: Path, config: PretrainConfig) -> None:
    config.accumulation(WORLD_SIZE)  # says what is wrong before anything is loaded
    for package in ("deepspeed", "wandb"):
        if not find_spec(package):
            raise ConfigError(f"training needs {package}: pip install 'tost-lm[train]'")
    from tost_lm.data.mixture import Corpora

    corpora = Corpora.open(config.data.folders)
    say = print if RANK == 0 else lambda line: None
    claim = claim_run_folder(config, corpora.fingerprint, say)
    if claim.resume_from and steps_behind(claim.resume_from) >= config.last_step:
        say(f"reusing {claim.resume_from}: nothing is left to train up to step {config.last_step}")
        return
    check_vocabulary(config, corpora)
    from tost_lm.training.loop import train

    train(config, corpora, claim)


def check_vocabulary(config: PretrainConfig, corpora: "Corpora") -> None:
    """Raises ConfigError when the shards hold tokens that the model has no embedding for."""
    if corpora.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {corpora.vocab_size} pieces: "
            f"set model.vocab_size to at least {corpora.vocab_size}"
        )


if __name__ == "__main__":
    run_program(main, name="pretrain.train", doc=__doc__ or "", takes="CONFIG", config=PretrainConfig)
