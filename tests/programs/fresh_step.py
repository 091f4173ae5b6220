"""The first step of a stage by other ways than `tost train`: by a new engine, and by torch alone in float64."""

import os
from pathlib import Path
from typing import Any

import torch
from engine_state import whole_state
from torch import Tensor

from tost_lm.checkpointing.format import Progress, StoredTensors
from tost_lm.checkpointing.reading import restore
from tost_lm.config import load_config
from tost_lm.data.loader import Corpora
from tost_lm.data.prefetch import micro_batches
from tost_lm.model import TostLM
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.optim.interface import optimizer_of
from tost_lm.parallel.mesh import build_mesh, start_world
from tost_lm.pretrain.batches import build_batches, tiling_of
from tost_lm.pretrain.engine import build_training_engine
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.step import train_step

Tensors = dict[str, Tensor]


def state_of(checkpoint: Path) -> Tensors:
    """Weights, and moments as statistic/name."""
    return {name: tensors[name] for kind in ("model", "optimizer") for tensors in [StoredTensors(checkpoint, kind)]
            for name in tensors}  # fmt: skip


def fresh_steps(folder: Path, recipe: str, words: list[str], before: Path, after: Path) -> dict[str, Tensors]:
    """The state of checkpoint `before` after one step of a recipe of one stage: by an `engine` and by torch alone, in
    `float32` and `float64`. The batch is that of the stages of `after`."""
    os.chdir(folder)
    config = load_config(PretrainConfig, Path(recipe), words)
    progress, corpora = Progress.read(before), Corpora.open(config.data.folders)
    mesh = build_mesh(start_world("cpu"), config.parallel)
    tiling = tiling_of(config, mesh)
    batch = build_batches(config, corpora, mesh, tiling, stages=Progress.read(after).stages)[progress.step]
    batches = micro_batches(batch, mesh.device)
    engine = build_training_engine(config, mesh)
    restore(engine, before)
    train_step(engine, batches, tiling, config.optim.lr)
    of_engine = whole_state(engine)
    by_torch = {str(dtype): _step_of_torch(config, before, progress.updates, batches, dtype)
                for dtype in (torch.float32, torch.float64)}  # fmt: skip
    return {"engine": of_engine, "float32": by_torch["torch.float32"], "float64": by_torch["torch.float64"]}


def _step_of_torch(
    config: PretrainConfig, checkpoint: Path, updates: int, batches: list[Any], dtype: torch.dtype
) -> Tensors:
    model, state = TostLM(config.model).to(dtype), state_of(checkpoint)
    model.load_state_dict({name: state[name] for name, _ in model.named_parameters()}, strict=False)
    optimizer = optimizer_of(config.optim).build(model, config.optim)
    for name, parameter in model.named_parameters():
        moments = {key: state[f"{key}/{name}"].to(dtype) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(updates)), **moments}
    tokens_BT, labels_BT = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "labels"))
    logits_BTV = model(tokens_BT).logits
    torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten().long(), ignore_index=IGNORED_LABEL
    ).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip or float("inf"))
    optimizer.step()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{key}/{name}": optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}
    return found
