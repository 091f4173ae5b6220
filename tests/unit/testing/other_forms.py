"""Models whose blocks have none of the published forms."""

from typing import Any

OTHER_FORMS: dict[str, Any] = {
    "norm": "rms", "mlp": "swiglu", "tied_head": False, "softmax": {"kv_heads": 2, "qk_norm": True},
}  # fmt: skip


def other_forms(**softmax: Any) -> dict[str, Any]:
    """The settings of blocks as in Qwen3.5, with more of softmax layers."""
    gated = {
        "gate": True, "head_size": 12, "rotary_fraction": 0.5, "rope_scaling": "yarn", "rope_scaling_factor": 4.0,
        "rope_original_length": 2048,
    }  # fmt: skip
    return {**OTHER_FORMS, "norm": "rms-zero-centered", "softmax": {**OTHER_FORMS["softmax"], **gated, **softmax}}
