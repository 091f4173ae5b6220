"""Models of the Hugging Face library, read and written. A new form adds its module and word of `convert.to` here."""

from typing import Literal

MODULES = ("llama", "qwen3", "qwen3_5", "olmo_hybrid")
"""Modules of this package, each with its `FORM`."""
Target = Literal["ours", "llama", "qwen3", "qwen3-5", "olmo-hybrid"]
"""`ours`, and modules, with hyphens."""
