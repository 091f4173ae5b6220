"""OLMo-Hybrid: three of four layers are the gated delta rule, and the fourth is full softmax attention.

In the latter the norms come after mixer and MLP, and those of queries and keys are over all heads.
"""

from tost_lm.interop.public_form import ATTENTION, DELTA, DELTA_SIZES, QK_NORM, PublicForm

OLMO_HYBRID = PublicForm(
    "OLMo-Hybrid", ("olmo_hybrid",), "OlmoHybridConfig", "OlmoHybridForCausalLM",
    blocks={
        "D": {
            **DELTA,
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
    sizes={**DELTA_SIZES, "delta.beta_to_two": "linear_allow_neg_eigval"},
    settings={"norm_after": "A", "softmax.qk_norm": "all-heads"},
    fixed={"head_dim": None},
    without_rotary={"rope_theta": None},
    misnamed={"A": {"feedforward_layer_norm.weight": "post_attention_layernorm.weight"}},
)  # fmt: skip
FORMAT = OLMO_HYBRID.format
