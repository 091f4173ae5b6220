"""Slot memory: token statistics of slots, written and read by memberships. Linear time, constant state.

Each head has S slots. A token is written to them with memberships w, and reads them with memberships r, softmaxes over
the slots:

    M_t = ρ M_{t−1} + w_t ⊗ u_t        N_t = ρ N_{t−1} + w_t        y_t = Σ_s r_{t,s} · M_{t,s} / (N_{t,s} + 1e-8)

M/N is the decayed mean of the values u in a slot. ρ = exp(log_decay) is constant per head.

Shapes: B sequences, T tokens, H heads, S slots a head, D channels of a head's values, E = D + 1 (M and N side by side),
N documents (N = B unless packed), n of them with tokens on this rank, K chunks of L tokens.
"""

from tost_lm.ops.slots.memory import SlotSums, slot_memory, slot_memory_step
from tost_lm.ops.slots.naive import slot_memory_naive

__all__ = ["SlotSums", "slot_memory", "slot_memory_naive", "slot_memory_step"]
