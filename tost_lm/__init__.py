"""Language models whose attention costs linear time and whose memory of the past is a few statistics."""

from typing import TYPE_CHECKING

from tost_lm.version import VERSION

if TYPE_CHECKING:
    from tost_lm.model.checkpoint import load as load

__version__ = VERSION
__all__ = ["__version__", "load"]


def __getattr__(name: str):
    # torch takes seconds to import, and programs answer --help without it.
    if name == "load":
        from tost_lm.model.checkpoint import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
