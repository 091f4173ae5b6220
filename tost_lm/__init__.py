"""Long-context language models: hybrids of softmax attention and layers with a state of constant size."""

from typing import TYPE_CHECKING

from tost_lm.version import VERSION

if TYPE_CHECKING:
    from tost_lm.interop.load import load as load
    from tost_lm.interop.load import load_tokenizer as load_tokenizer

__version__ = VERSION
__all__ = ["__version__", "load", "load_tokenizer"]


def __getattr__(name: str):
    # Importing torch takes seconds, and programs print --help without it.
    if name in ("load", "load_tokenizer"):
        from tost_lm.interop import load as loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
