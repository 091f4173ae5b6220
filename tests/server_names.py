"""Names of weights that vLLM's classes read, which tests/full/test_servers.py compares with them."""

import json
from pathlib import Path

from safetensors import safe_open

MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
NORMS = ["input_layernorm", "post_attention_layernorm"]
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
QK_NORMS = ["self_attn.q_norm", "self_attn.k_norm"]
GATES = ["linear_attn.A_log", "linear_attn.dt_bias"]
FULL, LINEAR = "full_attention", "linear_attention"
LAYERS: dict[str, dict[str, list[str]]] = {
    "llama": {FULL: [*ATTENTION, *MLP, *NORMS]},
    "qwen3": {FULL: [*ATTENTION, *QK_NORMS, *MLP, *NORMS]},
    "qwen3-5": {
        FULL: [*ATTENTION, *QK_NORMS, *MLP, *NORMS],
        LINEAR: [
            *GATES, *(f"linear_attn.{name}" for name in ("conv1d", "norm", "out_proj")),
            *(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "a", "b")), *MLP, *NORMS,
        ],
    },
    "olmo-hybrid": {
        FULL: [*ATTENTION, *QK_NORMS, *MLP, "post_attention_layernorm", "post_feedforward_layernorm"],
        LINEAR: [
            *GATES, *(f"linear_attn.{name}_conv1d" for name in "qkv"),
            *(f"linear_attn.{name}_proj" for name in "qkvgbao"), "linear_attn.o_norm", *MLP, *NORMS,
        ],
    },
}  # fmt: skip
"""By form and kind of layer, without `.weight`."""


def read_by_vllm(form: str, folder: Path) -> set[str]:
    """The names of a model with the settings in a folder."""
    config = json.loads((folder / "config.json").read_text())
    kinds = config.get("layer_types") or [FULL] * config["num_hidden_layers"]
    ends = ["model.embed_tokens", "model.norm", *([] if config["tie_word_embeddings"] else ["lm_head"])]
    layers = [f"model.layers.{n}.{name}" for n, kind in enumerate(kinds) for name in LAYERS[form][kind]]
    return {name if name.endswith(tuple(GATES)) else f"{name}.weight" for name in [*ends, *layers]}


def written(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())
