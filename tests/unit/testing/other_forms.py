"""A model whose blocks have none of the published forms."""

from typing import Any


def other_forms(**softmax: Any) -> dict[str, Any]:
    """The settings, with more of softmax layers."""
    own = {"kv_heads": 2, "qk_norm": True, **softmax}
    return {"norm": "rms", "mlp": "swiglu", "tied_head": False, "softmax": own}


OTHER_FORMS = other_forms()
