"""Checkpoints of the released language code (arXiv 2412.17810, a fork of nanoGPT), read and written.

Their train.py saves ckpt.pt by torch.save, a dictionary of:

    model          weights; `_orig_mod.` before the names in a compiled run; the tied head beside the embedding; causal
                   masks from old versions of PyTorch
    optimizer      state dict of torch.optim.AdamW with two groups: decayed matrices; temp, denom_bias and 1-D tensors
    model_args     n_layer, n_head, n_embd, block_size, bias, vocab_size, dropout, TSSA
    iter_num       updates so far
    best_val_loss  nats per token of the validation set
    config         settings of the run, not read here
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tost_lm.checkpointing.format import SETTINGS, StoredTensors, read_model_config
from tost_lm.checkpointing.run_folder import step_of
from tost_lm.config import leaves, read_toml, validate
from tost_lm.data.tokenizers import find_tokenizer
from tost_lm.errors import CheckpointError
from tost_lm.files import make_temp_folder, publish_folder, remove_temp_folder
from tost_lm.interop.gpt2 import (
    BLOCK,
    HEAD,
    MASKS,
    PREFIX,
    SIZES,
    SOFTMAX,
    check_supported,
    gpt2_name,
    match_weights,
    read_sizes,
)
from tost_lm.interop.interface import ForeignFormat, ForeignModel
from tost_lm.interop.torch_file import read_torch_file
from tost_lm.model import ModelConfig
from tost_lm.optim.settings import OptimConfig

MODEL_ARGS = {**SIZES, "block_size": "max_positions", "bias": "bias"}
"""Their arguments, and our settings."""
KNOWN_ARGS = {*MODEL_ARGS, "dropout", "TSSA"}
TSSA = {
    "pattern": "T",
    "positions": "learned",
    "tssa": {"membership": "energy-share", "denom_bias": "position"},
}
MODELS = {"T": {**TSSA, **BLOCK, "gelu": "exact"}, "A": {**SOFTMAX, "gelu": "exact"}}
"""Settings of their two models, by the letter of the mixer."""
LAYER_SCALE = 1e-5
"""Its initial value; the trained one is among the weights."""
COMPILED = "_orig_mod."
NO_LOSS = 1e9
"""best_val_loss before the first validation."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def read_authors(path: Path) -> ForeignModel:
    """Read a ckpt.pt without running anything in it.

    Raises:
        CheckpointError: it is damaged or not such a checkpoint, or its weights do not fit its sizes.
        ConfigError: its sizes are inconsistent.
    """
    stored = read_torch_file(path)
    for key in ("model", "model_args"):
        if not isinstance(stored, dict) or not isinstance(stored.get(key), dict):
            raise CheckpointError(f"{path}: not a checkpoint of the released code: it has no dictionary {key!r}")
    short_names = {name: str(name).removeprefix(COMPILED).removeprefix(PREFIX) for name in stored["model"]}
    found = {short: stored["model"][name] for name, short in short_names.items() if not short.endswith(MASKS)}
    if HEAD not in found:
        raise CheckpointError(f"{path}: lacks {HEAD}; give a checkpoint that train.py of the released code saved")
    config = _model_config(path, stored["model_args"], found)
    theirs = match_weights(path, config, found, lambda name, shape: (*shape, 1) if _has_extra_dim(name) else shape)
    weights = {name: _squeezed(name, weight) for name, weight in theirs.items()}
    moments, updates = _read_moments(stored.get("optimizer"), found, weights)
    iterations, nats = _number(stored.get("iter_num")) or 0, _number(stored.get("best_val_loss"))
    return ForeignModel(config, weights, int(iterations), None if nats == NO_LOSS else nats, moments, updates)


def to_authors(
    config: ModelConfig, weights: Mapping[str, Tensor], iterations: int, optim: OptimConfig | None = None
) -> dict[str, Any]:
    """The content of a ckpt.pt that their train.py resumes or evaluates.

    Args:
        weights: by our names.
        optim: settings of AdamW, whose moments start from zero there; None: the defaults.

    Raises:
        ConfigError: the released code has no such model; a line for each setting.
    """
    kind = "A" if set(config.pattern) == {"A"} else "T"
    ours = dict(leaves(config.model_dump())) | {"pattern": "".join(dict.fromkeys(config.pattern))}
    ours |= {
        "softmax.kv_heads": config.softmax.kv_heads or config.heads,
        "mlp_hidden": config.mlp_hidden or 4 * config.width,
    }
    only_softmax = {"window": 0, "qk_norm": False, "kv_heads": config.heads, "head_size": None, "gate": False}
    shared = {"mlp_hidden": 4 * config.width, "norm_epsilon": 1e-5}
    softmax = {"softmax": SOFTMAX["softmax"] | only_softmax} if kind == "A" else {}
    supported = dict(leaves(MODELS[kind] | shared | softmax))
    check_supported(ours, supported, "the released code")
    theirs = {gpt2_name(name): weights[name][..., None] if _has_extra_dim(name) else weights[name] for name in weights}
    if not config.layer_scale:  # their blocks always have it
        gammas = [f"h.{layer}.gamma{branch}" for layer in range(config.layers) for branch in (1, 2)]
        theirs |= {name: torch.ones(config.width) for name in gammas}
    arguments = {name: getattr(config, ours) for name, ours in MODEL_ARGS.items()}
    optim = optim or OptimConfig()
    groups = [
        {"params": [theirs[name] for name in names], "weight_decay": weight_decay}
        for names, weight_decay in zip(_optimizer_groups(theirs), (optim.weight_decay, 0.0), strict=True)
    ]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2))
    return {
        "model": {PREFIX + name: weight for name, weight in theirs.items()} | {HEAD: theirs["wte.weight"]},
        "optimizer": adamw.state_dict(),
        "model_args": {**arguments, "dropout": 0.0, "TSSA": kind == "T"},
        "iter_num": iterations,
        "best_val_loss": NO_LOSS,
        "config": {},
    }


def write_authors(folder: Path, checkpoint: dict[str, Any]) -> None:
    """Write a folder with a ckpt.pt, complete or not at all.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    try:
        temporary = make_temp_folder(folder)
        with (temporary / "ckpt.pt").open("wb") as file:
            torch.save(checkpoint, file)
        publish_folder(temporary, folder)
    except (OSError, RuntimeError) as error:
        remove_temp_folder(folder)
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch fails again when it closes
        if not isinstance(cause, OSError):
            raise
        raise CheckpointError(f"{folder}: cannot be written: {cause.strerror}") from None


def _model_config(path: Path, arguments: dict[str, Any], found: Mapping[str, Any]) -> ModelConfig:
    """The model settings that the arguments and the names of the weights describe."""
    where = Path(f"{path}: model_args")
    tree = read_sizes(arguments, MODEL_ARGS, where)
    if unknown := [name for name, value in arguments.items() if name not in KNOWN_ARGS and value]:
        raise CheckpointError(f"{where}: unknown option: {unknown[0]} {arguments[unknown[0]]!r}; train without it")
    is_tssa = any(name.endswith(".attn.temp") for name in found)
    if bool(arguments.get("TSSA", is_tssa)) != is_tssa:
        kind = "TSSA" if is_tssa else "softmax attention"
        raise CheckpointError(
            f"{where}: TSSA {arguments['TSSA']!r} contradicts the weights, which are of {kind}; copy the file again"
        )
    layer_scale = LAYER_SCALE if any(name.endswith(".gamma1") for name in found) else 0.0
    return validate(ModelConfig, {**MODELS["T" if is_tssa else "A"], **tree, "layer_scale": layer_scale}, str(where))


def _read_moments(
    optimizer: Any, found: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], int]:
    """Moments by our labels and the step count of their AdamW; nothing if they do not fit the weights."""
    ours = {gpt2_name(name): name for name in weights}
    groups = _optimizer_groups({name: weight for name, weight in found.items() if name != HEAD})
    moments, updates = {}, 0
    try:
        indices = [group["params"] for group in optimizer["param_groups"]]
        if not optimizer["state"] or [*map(len, indices)] != [*map(len, groups)]:
            return {}, 0
        for names, of_group in zip(groups, indices, strict=True):
            for name, index in zip(names, of_group, strict=True):
                state = optimizer["state"][index]
                updates = int(state["step"])
                for moment in MOMENTS:
                    if state[moment].shape != found[name].shape:
                        return {}, 0
                    moments[f"{moment}/{ours[name]}"] = _squeezed(ours[name], state[moment].float())
    except (TypeError, KeyError, AttributeError, ValueError):
        return {}, 0
    return moments, updates


def _optimizer_groups(theirs: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The weights of their two groups, decayed and not decayed. AdamW numbers them in this order."""
    decayed = [name for name, weight in theirs.items() if weight.dim() >= 2 and not _has_extra_dim(name)]
    return decayed, [name for name in theirs if name not in decayed]


def _has_extra_dim(name: str) -> bool:
    """temp is [H, 1] there, denom_bias [H, positions, 1]."""
    return name.endswith((".temp", ".denom_bias"))


def _squeezed(name: str, tensor: Tensor) -> Tensor:
    return (tensor.squeeze(-1) if _has_extra_dim(name) else tensor).contiguous()


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else None


def _write(folder: Path, checkpoint: Path, _like: Path | None) -> list[str]:
    recorded = checkpoint / SETTINGS
    optim = validate(OptimConfig, read_toml(recorded)["optim"] if recorded.is_file() else {}, str(recorded))
    weights = StoredTensors(checkpoint, "model")
    theirs = to_authors(read_model_config(checkpoint), weights, step_of(checkpoint) or 0, optim)
    tokenizer = find_tokenizer(checkpoint)
    write_authors(folder, theirs)
    return [
        f"{checkpoint}: written to {folder / 'ckpt.pt'} for init_from=resume of the released train.py",
        f"a ckpt.pt holds no tokenizer; its ids are those of {tokenizer}",
    ]


FORMAT = ForeignFormat("ckpt.pt of the released code (arXiv 2412.17810)", (), read_authors, lambda source: None, _write)
