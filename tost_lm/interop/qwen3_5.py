"""Qwen3.5, dense: three of four layers are the gated delta rule, and the fourth is softmax attention with a gate.

The text part of a folder with images is read too; it is written as a model of texts alone.
"""

from tost_lm.interop.public_form import PublicForm
from tost_lm.interop.public_layers import ATTENTION, DELTA, QK_NORM

FORM = PublicForm(
    "Qwen3.5", ("qwen3_5_text", "qwen3_5"), "Qwen3_5TextConfig", "Qwen3_5ForCausalLM",
    blocks={
        "D": {
            **DELTA,
            "mixer.in_proj.weight": [f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")],
            "mixer.norm": ["linear_attn.norm.weight"],
            "mixer.out_proj.weight": ["linear_attn.out_proj.weight"],
        },
        "A": {**ATTENTION, **QK_NORM},
    },
    sizes={"softmax.head_size": "head_dim", "delta.norm_epsilon": "rms_norm_eps"},
    settings={"norm": "rms-zero-centered", "softmax.qk_norm": True, "softmax.gate": True},
    partial_rotary=True, without_rotary={"partial_rotary_factor": 0.0}, renamed={"model.language_model.": "model."},
)  # fmt: skip
