"""A model as the released code saves it."""

from typing import Any

import torch

from tost_lm.interop.authors import gpt2_name
from tost_lm.model import TostLM


def to_released(model: TostLM, iterations: int) -> dict[str, Any]:
    """The content of their ckpt.pt, with the weights of the model and an AdamW that has made no step."""
    weights, groups = {}, ([], [])
    for name, weight in model.state_dict().items():
        has_extra_dim = name.endswith((".temp", ".denom_bias"))
        weights[gpt2_name(name)] = weight[..., None] if has_extra_dim else weight
        groups[has_extra_dim or weight.dim() < 2].append(weights[gpt2_name(name)])
    adamw = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}])
    config = model.config
    sizes = {"n_layer": config.layers, "n_head": config.heads, "n_embd": config.width, "vocab_size": config.vocab_size}
    return {
        "model": {f"transformer.{name}": x for name, x in weights.items()} | {"lm_head.weight": weights["wte.weight"]},
        "optimizer": adamw.state_dict(),
        "model_args": {**sizes, "block_size": config.max_positions, "bias": config.bias, "dropout": 0.0, "TSSA": True},
        "iter_num": iterations,
        "best_val_loss": 1e9,
        "config": {},
    }
