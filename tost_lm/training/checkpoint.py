"""Training checkpoints: a model folder with the optimizer's state beside the weights, by parameter name.

Every tensor is whole and float32, so a checkpoint resumes on any mix of tensor, sequence and data ranks and ZeRO stage.
"""

import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tost_lm.data.mixture import Corpora
from tost_lm.model.checkpoint import step_folders, write_checkpoint
from tost_lm.model.config import ModelConfig
from tost_lm.parallel import zero
from tost_lm.parallel.world import is_rank_0
from tost_lm.training.run_folder import steps_behind, write_progress


def save(engine: Any, folder: Path, config: ModelConfig, steps: int, corpora: Corpora) -> None:
    """Gather weights and optimizer state (all ranks together, tensor by tensor) and let rank 0 write them."""
    writes = is_rank_0()
    weights = {name: tensor for name, tensor in zero.full_weights(engine) if writes}
    moments = {f"{key}/{name}": tensor for name, key, tensor in zero.full_moments(engine) if writes}
    if not writes:
        return

    def write_optimizer(aside: Path) -> None:
        save_file(moments, aside / "optimizer.safetensors")
        write_progress(aside, steps, corpora.fingerprint)

    write_checkpoint(folder, config, weights, corpora.tokenizer(), write_optimizer)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Whole float32 weights by parameter name."""
    return load_file(folder / "model.safetensors")


def restore(engine: Any, folder: Path) -> int:
    """Put a checkpoint's optimizer state into a fresh engine that has its weights; the number of steps behind it."""
    step = steps_behind(folder)
    weights = read_weights(folder)
    with safe_open(folder / "optimizer.safetensors", framework="pt") as file:
        labels = [label.split("/") for label in sorted(file.keys())]
        moments = ((name, statistic, file.get_tensor(f"{statistic}/{name}")) for statistic, name in labels)
        zero.restore(engine, weights, moments, step)
    return step


def prune(newest: Path, keep: int) -> None:
    """Let rank 0 delete what an interrupted save left, and all but `keep` checkpoints up to `newest`.

    Those after it are damaged ones that the run was resumed before; they do not count.
    """
    if not is_rank_0():
        return
    up_to_newest = [folder for folder in step_folders(newest.parent.parent) if folder.name <= newest.name]
    for folder in [*newest.parent.glob(".step_*"), *up_to_newest[:-keep]]:
        shutil.rmtree(folder)
