"""Slot memory: token statistics of slots, written and read by memberships. Linear time, constant state.

Each head has S slots. A token is written to them with memberships w, and reads them with memberships r, softmaxes over
the slots:

    M_t = ρ M_{t−1} + w_t ⊗ u_t        N_t = ρ N_{t−1} + w_t        y_t = Σ_s r_{t,s} · M_{t,s} / (N_{t,s} + 1e-8)

M/N is the decayed mean of the values u in a slot. ρ = exp(log_decay) is constant per head. Without decay, and with eᵏ
in place of w, it is causal Efficient Attention (arXiv 1812.01243). The softmax over slots is that of Slot Attention
(2006.15055), the shift of keys that of H3 (2212.14052); see docs/operator.md.

Here are the formulas as written, with a [T, T] decay mask, the reference of every test; the public operator with state
in and state out; and its step for decoding.

Shapes: B sequences, T tokens, H heads, S slots a head, D channels of a head's values, E = D + 1 (M and N side by side),
N documents (N = B unless packed), n of them with tokens on this rank, K chunks of L tokens.
"""

from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.mixers.slots import chunks
from tost_lm.ops.exchange import Decay, exchange
from tost_lm.ops.layout import LocalDocuments, SequenceShard
from tost_lm.ops.precision import MASS_FLOOR, running_dtype, statistics_dtype


def slot_memory_naive(read_BTHS: Tensor, write_BTHS: Tensor, value_BTHD: Tensor, log_decay_H: Tensor) -> Tensor:
    """y [B, T, H, D] of whole rows that start empty."""
    t = torch.arange(read_BTHS.shape[1], device=read_BTHS.device)
    age_TT = t[:, None] - t
    log_HTT = log_decay_H[:, None, None] * age_TT
    mask_HTT = log_HTT.masked_fill(age_TT < 0, -torch.inf).exp()
    mass_BTHS = torch.einsum("hij,bjhs->bihs", mask_HTT, write_BTHS)
    memory_BTHSD = torch.einsum("hij,bjhs,bjhd->bihsd", mask_HTT, write_BTHS, value_BTHD)
    return torch.einsum("bihs,bihsd->bihd", read_BTHS / (mass_BTHS + MASS_FLOOR), memory_BTHSD)


class SlotSums(NamedTuple):
    """The sums over some tokens, zeros before the first one. float64 for decoding, else float32."""

    memory: Tensor
    """M, [N, H, S, D]."""
    mass: Tensor
    """N, [N, H, S]."""


def slot_memory(
    read: Tensor,
    write: Tensor,
    value: Tensor,
    log_decay: Tensor,
    *,
    local: LocalDocuments,
    initial_state: SlotSums | None = None,
    output_final_state: bool = False,
    shard: SequenceShard | None = None,
) -> tuple[Tensor, SlotSums | None]:
    """Write each token to the slots of its heads, and read them, up to and including the token itself.

    Chunk by chunk: Triton kernels for CUDA tensors in float32, bfloat16 or float16 of up to 64 slots and 256 channels
    where Triton is installed, else PyTorch. Sums are float32 or wider within a chunk and float64 between chunks.

    Args:
        read: memberships that the slots are read with, [B, T, H, S].
        write: memberships that the slots are written with, [B, T, H, S].
        value: [B, T, H, D], any floating dtype.
        log_decay: log ρ of each head, [H], at most 0.
        local: the documents of these tokens; each starts empty, or from its row of `initial_state`.
        initial_state: the state of N documents, differentiable; None: empty.
        output_final_state: return the state after the last token of each document, differentiable; else None.
        shard: the tokens are a sequence shard. States and their gradients are equal on all ranks.

    Returns:
        y [B, T, H, D] in the dtype of `value`, and the final state of N documents or None.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(read, write, value, log_decay)
    dtype = statistics_dtype(value)
    N = len(local.whole_lengths)
    with torch.autocast(value.device.type, enabled=False):
        compute = _kernels(write, value) or chunks
        read, write, values = (x.flatten(0, 1) for x in (read, write, value))
        initial = _joined(initial_state, value.new_empty(N, *write.shape[1:], value.shape[-1]))
        log_decay = log_decay.to(dtype)
        if shard is None:
            y, final = compute.slot_memory_chunks(read, write, values, initial, log_decay, local.lengths)
        else:
            added = compute.final_state(
                write, values, torch.zeros_like(initial[local.documents]), log_decay, local.lengths
            )
            per_document = initial_state is not None or output_final_state
            decay_C = log_decay.to(added.dtype).repeat_interleave(added[0, 0].numel())
            before, final = exchange(
                shard, local, Decay, initial.flatten(1), added.flatten(1), decay_C, per_document=per_document
            )
            y, _ = compute.slot_memory_chunks(read, write, values, before.view_as(added), log_decay, local.lengths)
    y = y.view_as(value)
    if final is None or not output_final_state:
        return y, None
    final = final.view_as(initial)
    return y, SlotSums(final[..., :-1], final[..., -1])


def slot_memory_step(
    read: Tensor, write: Tensor, value: Tensor, log_decay: Tensor, state: SlotSums
) -> tuple[Tensor, SlotSums]:
    """One token after those of `state`: the result of `slot_memory` for T = 1, differentiable.

    The returned state is float64 (float32 on mps).

    Args:
        read, write: [N, H, S].
        value: [N, H, D].
        log_decay: [H].
        state: N rows.

    Returns:
        y [N, H, D] in the dtype of `value`, and the state that includes the token.
    """
    dtype, running = statistics_dtype(value), running_dtype(value.device)
    with torch.autocast(value.device.type, enabled=False):
        decay_HS = log_decay.to(running).exp()[:, None]
        write = write.to(running)
        memory = decay_HS[..., None] * state.memory.to(running) + write[..., None] * value.to(running)[..., None, :]
        mass = decay_HS * state.mass.to(running) + write
        share_NHS = read.to(dtype) / (mass.to(dtype) + MASS_FLOOR)
        y_NHD = (share_NHS[..., None, :] @ memory.to(dtype)).squeeze(-2)
    return y_NHD.to(value.dtype), SlotSums(memory, mass)


def _kernels(write: Tensor, value: Tensor) -> ModuleType | None:
    """The functions of `chunks` in Triton, if its kernels support the tensors."""
    fits = write.shape[-1] <= 64 and value.shape[-1] <= 256 and value.dtype != torch.float64
    if not (value.is_cuda and fits and find_spec("triton")):
        return None
    from tost_lm.mixers.slots import triton  # an optional package, and slow to import

    return triton


def _joined(state: SlotSums | None, like: Tensor) -> Tensor:
    """M and N side by side, [N, H, S, E], in the dtype of running sums."""
    running = running_dtype(like.device)
    if state is None:
        return like.new_zeros(*like.shape[:-1], like.shape[-1] + 1, dtype=running)
    if state.memory.shape != like.shape or state.mass.shape != like.shape[:-1]:
        raise ValueError(
            f"the state must be {list(like.shape)} and {list(like.shape[:-1])}, got {list(state.memory.shape)} and "
            f"{list(state.mass.shape)}"
        )
    return torch.cat([state.memory.to(running), state.mass.to(running)[..., None]], -1)


def _check(read: Tensor, write: Tensor, value: Tensor, log_decay: Tensor) -> None:
    if value.dim() != 4 or not value.is_floating_point():
        raise ValueError(f"value must be floating point [B, T, H, D], got {value.dtype} {list(value.shape)}")
    B, T, H, _ = value.shape
    if read.dim() != 4 or read.shape[:3] != (B, T, H) or read.shape != write.shape:
        raise ValueError(
            f"read and write must be [B, T, H, S] = {[B, T, H, 'S']}, got {list(read.shape)} and {list(write.shape)}"
        )
    if log_decay.shape != (H,):
        raise ValueError(f"log_decay must be [H] = [{H}], got {list(log_decay.shape)}")
