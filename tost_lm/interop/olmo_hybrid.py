"""OLMo-Hybrid: three of four layers are the gated delta rule, and the fourth is full softmax attention.

In the latter the norms come after mixer and MLP, and those of queries and keys are over all heads.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tost_lm.interop.public_form import PublicForm
from tost_lm.interop.public_layers import ATTENTION, DELTA, QK_NORM

CONV = "conv1d.weight"
"""The library's name of a convolution. In files, queries, keys and values have their own."""


class _OlmoHybrid(PublicForm):
    """Its files may divide a convolution anywhere, as `save_pretrained` of transformers 5.23 and 5.24 does."""

    def in_files(self, model: Any, stored: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        found = super().in_files(model)
        for name in [name for name in found if name.endswith(CONV)]:
            conv, stem = found.pop(name), name.removesuffix(CONV)
            names = [f"{stem}{one}_{CONV}" for one in "qkv"]
            rows = [stored[one].shape[:1].numel() if stored and one in stored else 0 for one in names]
            if sum(rows) != len(conv):
                rows = [len(found[f"{stem}{one}_proj.weight"]) for one in "qkv"]
            found |= zip(names, conv.split(rows), strict=True)
        return found


FORM = _OlmoHybrid(
    "OLMo-Hybrid", ("olmo_hybrid",), "OlmoHybridConfig", "OlmoHybridForCausalLM",
    blocks={
        "D": {
            **DELTA,
            "mixer.conv": [f"linear_attn.{name}_conv1d.weight" for name in "qkv"],
            "mixer.in_proj.weight": [f"linear_attn.{name}_proj.weight" for name in "qkvgba"],
            "mixer.norm": ["linear_attn.o_norm.weight"],
            "mixer.out_proj.weight": ["linear_attn.o_proj.weight"],
        },
        "A": {
            **ATTENTION,
            **QK_NORM,
            "mixer_norm.weight": ["post_attention_layernorm.weight"],
            "mlp_norm.weight": ["post_feedforward_layernorm.weight"],
        },
    },
    sizes={"delta.beta_to_two": "linear_allow_neg_eigval"},
    settings={"norm_after": "A", "softmax.qk_norm": "all-heads"},
    fixed={"head_dim": None},
    without_rotary={"rope_theta": None},
    renamed={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
)  # fmt: skip
