"""The operator as pure functions of tensors."""

from tost_lm.ops.bidirectional import tssa
from tost_lm.ops.causal import causal_tssa, tssa_step
from tost_lm.ops.naive import Membership, TssaState

__all__ = ["Membership", "TssaState", "causal_tssa", "tssa", "tssa_step"]
