"""Interfaces to other libraries and checkpoint formats.

A new foreign format adds its module here and, if models are written in it, its word of `convert.to`.
"""

from typing import Literal

MODULES = ("llama", "qwen3", "qwen3_5", "olmo_hybrid")
"""Modules of this package, each with a `FORMAT` of folders of the Hugging Face library."""
Target = Literal["ours", "llama", "qwen3", "qwen3-5", "olmo-hybrid"]
"""`ours`, and modules whose format is also written, with hyphens."""
