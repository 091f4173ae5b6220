"""A model whose blocks have none of the published forms."""

from typing import Any

OTHER_FORMS: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "tied_head": False, "kv_heads": 2, "qk_norm": True}
"""For models of 4 heads."""
