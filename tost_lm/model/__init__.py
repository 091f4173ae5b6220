"""The language model, and an encoder.

Shapes: B sequences, T tokens, C channels (width), H heads, D channels a head, V vocabulary; S keys (of earlier tokens
and of these), N documents (N = B unless packed).
"""

from typing import TYPE_CHECKING

from tost_lm.model.config import EncoderConfig, ModelConfig, VisionConfig

if TYPE_CHECKING:
    from tost_lm.model.block import LMOutput as LMOutput
    from tost_lm.model.block import LMState as LMState
    from tost_lm.model.encoder import Encoder as Encoder
    from tost_lm.model.lm import TostLM as TostLM

__all__ = ["Encoder", "EncoderConfig", "LMOutput", "LMState", "ModelConfig", "TostLM", "VisionConfig"]


def __getattr__(name: str):
    # The settings do not need torch.
    if name == "Encoder":
        from tost_lm.model.encoder import Encoder

        return Encoder
    if name in __all__:
        from tost_lm.model import lm

        return getattr(lm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
