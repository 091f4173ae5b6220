"""A model as the released code saves it."""

from typing import Any

from tost_lm.interop.authors import gpt2_name
from tost_lm.model import TostLM


def to_released(model: TostLM, iterations: int) -> dict[str, Any]:
    """What is read of their ckpt.pt, with the weights of the model."""
    weights = {}
    for name, weight in model.state_dict().items():
        has_extra_dim = name.endswith((".temp", ".denom_bias"))
        weights[gpt2_name(name)] = weight[..., None] if has_extra_dim else weight
    config = model.config
    sizes = {"n_layer": config.layers, "n_head": config.heads, "n_embd": config.width, "vocab_size": config.vocab_size}
    return {
        "model": {f"transformer.{name}": x for name, x in weights.items()} | {"lm_head.weight": weights["wte.weight"]},
        "model_args": {**sizes, "block_size": config.max_positions, "bias": config.bias, "dropout": 0.0, "TSSA": True},
        "iter_num": iterations,
        "best_val_loss": 1e9,
    }
