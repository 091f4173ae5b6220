"""The layers of models of the Hugging Face library, by mixer: settings, names of weights, order of their rows, and
rotary embeddings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tost_lm.errors import CheckpointError
from tost_lm.mixers.delta.settings import CONV_TAPS, DeltaSizes
from tost_lm.mixers.softmax.settings import SoftmaxSizes
from tost_lm.model import ModelConfig
from tost_lm.ops.rotary import LLAMA3_LENGTH

MLP = {
    "mlp.in_proj.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.out_proj.weight": ["mlp.down_proj.weight"],
}
NORMS = {
    "mixer_norm.weight": ["input_layernorm.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
}
ATTENTION = {
    "mixer.in_proj.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
    "mixer.out_proj.weight": ["self_attn.o_proj.weight"],
    **NORMS,
    **MLP,
}
QK_NORM = {f"mixer.{name}_norm.weight": [f"self_attn.{name}_norm.weight"] for name in "qk"}
DELTA = {
    "mixer.conv": ["linear_attn.conv1d.weight"],
    "mixer.log_rate": ["linear_attn.A_log"],
    "mixer.step_bias": ["linear_attn.dt_bias"],
    **NORMS,
    **MLP,
}
DELTA_SIZES = {
    "delta.qk_heads": "linear_num_key_heads",
    "delta.value_heads": "linear_num_value_heads",
    "delta.qk_size": "linear_key_head_dim",
    "delta.value_size": "linear_value_head_dim",
}
ROTARY = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
"""Their settings of a rotary embedding, of every type."""
LENGTH, LLAMA3 = "original_max_position_embeddings", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED: dict[str, tuple[set[str], dict[str, Any]]] = {
    "default": (set(), {}),
    "linear": ({"factor"}, {}),
    "llama3": ({"factor", LENGTH}, LLAMA3),
    "yarn": ({"factor", LENGTH, "attention_factor"}, {"beta_fast": 32, "beta_slow": 1, "truncate": True}),
}
"""By their type of the rotary embedding, the settings of its scaling, and those with one supported value."""


@dataclass(frozen=True)
class PublicLayer:
    """A layer with a mixer of this package."""

    kind: str
    """In their setting `layer_types`."""
    sizes: dict[str, str]
    """Our settings, and theirs."""
    settings: dict[str, Any]
    """Our settings of all models of a form, unless it names others."""
    fixed: dict[str, Any]
    """Their settings with one supported value."""
    values: Callable[[ModelConfig], dict[str, Any]]
    """The values of our settings that may be unset."""
    rows: Callable[[ModelConfig], dict[str, Tensor]]
    """By parameter of a layer, which of their rows, one tensor after the other, are ours."""


def _softmax_values(config: ModelConfig) -> dict[str, Any]:
    head = SoftmaxSizes.of(config.shape_of("A")).head
    return {"softmax.kv_heads": config.softmax.kv_heads or config.heads, "softmax.head_size": head}


def _softmax_rows(config: ModelConfig) -> dict[str, Tensor]:
    """Our gates are the last; theirs follow the queries of each head."""
    sizes = SoftmaxSizes.of(config.shape_of("A"))
    if not sizes.gate:
        return {}
    queries, others = torch.arange(sizes.projected).split([2 * sizes.queries, 2 * sizes.keys])
    query, gate = queries.unflatten(0, (-1, 2, sizes.head)).unbind(1)
    return {"mixer.in_proj.weight": torch.cat([query.flatten(), others, gate.flatten()])}


def _delta_rows(config: ModelConfig) -> dict[str, Tensor]:
    """Ours are those of one key head after the other."""
    h, H, K, V = DeltaSizes.of(config.shape_of("D"))
    group = H // h
    of_head = [K, K, group * V, group * V, group, group]
    return {"mixer.in_proj.weight": _by_head(h, of_head), "mixer.conv": _by_head(h, of_head[:3])}


def _by_head(heads: int, sizes: list[int]) -> Tensor:
    """The rows of tensors with `sizes` rows for each head, one head after the other."""
    rows = torch.arange(heads * sum(sizes)).split([heads * size for size in sizes])
    return torch.cat([x.unflatten(0, (heads, -1)) for x in rows], 1).flatten()


LAYERS = {
    "D": PublicLayer(
        "linear_attention", DELTA_SIZES,
        {"delta.beta_to_two": False, "delta.decay_per_channel": False, "delta.norm_epsilon": 1e-5},
        {"linear_conv_kernel_dim": CONV_TAPS},
        lambda config: dict(zip(DELTA_SIZES, DeltaSizes.of(config.shape_of("D")), strict=True)), _delta_rows,
    ),
    "A": PublicLayer(
        "full_attention", {"softmax.kv_heads": "num_key_value_heads"},
        {"softmax.qk_norm": False, "softmax.conv": False, "softmax.window": 0, "softmax.gate": False,
         "softmax.rotary_fraction": 1.0},
        {"is_causal": True, "sliding_window": None, "attention_chunk_size": None, "kv_sharing_modes": None},
        _softmax_values, _softmax_rows,
    ),
}  # fmt: skip
"""By letter."""


def fixed_rotary(theirs: Any, rope: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Their settings of a rotary embedding with one supported value. Raises CheckpointError: its type is not
    supported."""
    if (scaling := rope.get("rope_type", "default")) not in list(SCALED):  # perhaps no string
        raise unsupported(where, "rope_type", scaling, f"with one of {', '.join(SCALED)}")
    if (length := getattr(theirs, LENGTH, None)) is not None:  # it would replace that of another scaling
        raise unsupported(where, LENGTH, length, "with it in rope_parameters")
    read, fixed = SCALED[scaling]
    unknown = sorted(name for name in rope.keys() - ROTARY - read if not name.startswith("mrope"))
    return {**dict.fromkeys(unknown), **fixed}


def our_rotary(rope: Mapping[str, Any], without: Mapping[str, Any] | None, where: Path) -> dict[str, Any]:
    """Our settings of a rotary embedding whose type is in SCALED. Raises CheckpointError.

    Args:
        without: their settings for none; None: there is one.
    """
    if without and all(rope.get(name) == value for name, value in without.items()):
        return {"softmax.rope_theta": 0.0}
    if not (theta := rope.get("rope_theta")):
        raise unsupported(where, "rope_theta", theta, "with one above 0")
    ours = {"softmax.rope_theta": theta, "softmax.rotary_fraction": rope.get("partial_rotary_factor", 1.0)}
    if (scaling := rope.get("rope_type", "default")) != "default":
        ours |= {"softmax.rope_scaling": scaling, "softmax.rope_scaling_factor": rope.get("factor")}
    if LENGTH in SCALED[scaling][0]:
        ours["softmax.rope_original_length"] = rope.get(LENGTH)
    return ours


def their_rotary(config: ModelConfig, without: Mapping[str, Any] | None, *, partial: bool) -> dict[str, Any]:
    """Their settings. `partial`: the rotary embedding may rotate a part of each head."""
    own = config.softmax
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": own.rope_theta or 10000.0}
    if not own.rope_theta:
        return rotary | {**(without or {})}
    if own.rope_scaling_factor != 1:
        rotary |= {"rope_type": own.rope_scaling, "factor": own.rope_scaling_factor}
        if own.rope_scaling != "linear":
            rotary[LENGTH] = own.rope_original_length or LLAMA3_LENGTH
        if own.rope_scaling == "llama3":
            rotary |= LLAMA3
    return rotary | ({"partial_rotary_factor": own.rotary_fraction} if partial else {})


def unsupported(where: Path, name: str, given: object, instead: str) -> CheckpointError:
    return CheckpointError(f"{where}: unsupported {name}: {given!r}; give a model {instead}")
