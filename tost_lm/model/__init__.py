"""The language model.

Shapes: B sequences, T tokens, C channels (width), H heads, D channels a head, V vocabulary; S keys (of earlier tokens
and of these), N documents (N = B unless packed).
"""

from typing import TYPE_CHECKING

from tost_lm.model.config import ModelConfig

if TYPE_CHECKING:
    from tost_lm.model.block import LMOutput as LMOutput
    from tost_lm.model.block import LMState as LMState
    from tost_lm.model.lm import TostLM as TostLM

__all__ = ["LMOutput", "LMState", "ModelConfig", "TostLM"]


def __getattr__(name: str):
    # The settings do not need torch.
    if name in __all__:
        from tost_lm.model import lm

        return getattr(lm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
