"""Slot memory in PyTorch, chunk by chunk, with its closed-form backward; it stores its inputs and few states.

A group of chunks at a time is laid out head by head, so that it stays in a core's cache. What its chunks add to M and N
is summed, scanned over the chunks, and read. The backward computes this again, last group first, from the state before
the group.

Shapes as in `tost_lm.mixers.slots.memory`; k chunks of a group, L tokens in a chunk, n documents on this rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from tost_lm.ops.layout import int64_tensor
from tost_lm.ops.precision import MASS_FLOOR, running_dtype, statistics_dtype
from tost_lm.sizes import SLOT_CHUNK_TOKENS, SLOT_GROUP_ELEMENTS


def slot_memory_chunks(
    read_MHS: Tensor, write_MHS: Tensor, value_MHD: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor,
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [M, H, D], and M and N after each document, [n, H, S, E], from those before it."""
    return _SlotMemory.apply(read_MHS, write_MHS, value_MHD, initial_nHSE, log_decay_H, lengths)  # pyright: ignore[reportReturnType]


def final_state(
    write_MHS: Tensor, value_MHD: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor, lengths: Sequence[int]
) -> Tensor:
    """M and N after each document, without the reads."""
    return _SlotMemory.apply(None, write_MHS, value_MHD, initial_nHSE, log_decay_H, lengths)[1]  # pyright: ignore


class _SlotMemory(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        read_MHS: Tensor | None,
        write_MHS: Tensor,
        value_MHD: Tensor,
        initial_nHSE: Tensor,
        log_decay_H: Tensor,
        lengths: Sequence[int],
    ):
        y_MHD, final_nHSE = torch.empty_like(value_MHD), torch.empty_like(initial_nHSE)
        state_HSE, states, decays = initial_nHSE[0], [], _Decays(log_decay_H, lengths)
        ctx.groups, ctx.lengths = list(_groups(lengths, len(log_decay_H))), lengths
        for group in ctx.groups:
            states.append(state_HSE)
            write, value = group.split(write_MHS), group.split(value_MHD)
            before_kHSE, after_kHSE = group.scan(_Sums(write, value, group, decays), initial_nHSE, state_HSE)
            state_HSE = after_kHSE[-1]
            for chunk, after_HSE in zip(group.chunks, after_kHSE, strict=True):
                if chunk.is_last:
                    final_nHSE[chunk.document] = after_HSE
            if read_MHS is not None:
                group.join(y_MHD, _Read(group.split(read_MHS), write, value, before_kHSE, decays).output())
        ctx.save_for_backward(read_MHS, write_MHS, value_MHD, initial_nHSE, log_decay_H, torch.stack(states))
        return (y_MHD if read_MHS is not None else None), final_nHSE

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_MHD: Tensor, d_final_nHSE: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        read_MHS, write_MHS, value_MHD, initial_nHSE, log_decay_H, states = ctx.saved_tensors
        d_read_MHS = None if read_MHS is None else torch.empty_like(read_MHS)
        d_write_MHS, d_value_MHD = torch.empty_like(write_MHS), torch.empty_like(value_MHD)
        d_initial_nHSE, d_state_HSE = torch.empty_like(d_final_nHSE), d_final_nHSE[0]
        decays = _Decays(log_decay_H, ctx.lengths)
        d_log_decay_H = torch.zeros_like(decays.running_H)
        for group, state_HSE in zip(reversed(ctx.groups), states.flip(0), strict=True):
            write, value = group.split(write_MHS), group.split(value_MHD)
            sums = _Sums(write, value, group, decays)
            before_kHSE, _ = group.scan(sums, initial_nHSE, state_HSE)
            if read_MHS is None:
                d_write, d_value, d_before_kHSE = 0, 0, torch.zeros_like(before_kHSE)
            else:
                part = _Read(group.split(read_MHS), write, value, before_kHSE, decays)
                d_read, d_write, d_value, d_before_kHSE, d_log = part.backward(group.split(dy_MHD))
                group.join(d_read_MHS, d_read)
                d_log_decay_H += d_log
            d_sums = []
            for i, chunk in reversed(list(enumerate(group.chunks))):
                if chunk.is_last:
                    d_state_HSE = d_final_nHSE[chunk.document]
                d_sums.append(d_state_HSE)
                faded_HSE = sums.faded_kH11[i] * d_state_HSE
                d_log_decay_H += chunk.tokens * (before_kHSE[i] * faded_HSE).sum((-2, -1))
                d_state_HSE = faded_HSE + d_before_kHSE[i]
                if chunk.is_first:
                    d_initial_nHSE[chunk.document] = d_state_HSE
            d_written, d_valued, d_log = sums.backward(torch.stack(d_sums[::-1]))
            d_log_decay_H += d_log
            group.join(d_write_MHS, d_written + d_write)
            group.join(d_value_MHD, d_valued + d_value)
        return d_read_MHS, d_write_MHS, d_value_MHD, d_initial_nHSE, d_log_decay_H.to(decays.log_H.dtype), None


class _Chunk(NamedTuple):
    """Consecutive tokens of a document."""

    document: int
    tokens: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class _Group:
    """Consecutive chunks."""

    tokens: slice
    chunks: tuple[_Chunk, ...]

    def split(self, x_MHX: Tensor) -> Tensor:
        """[k, H, L, X] in the statistics dtype; shorter chunks are padded with zeros."""
        sizes = [chunk.tokens for chunk in self.chunks]
        x_mHX = x_MHX[self.tokens].to(statistics_dtype(x_MHX))
        if len(set(sizes)) == 1:
            return x_mHX.unflatten(0, (len(sizes), -1)).transpose(1, 2).contiguous()
        return pad_sequence(list(x_mHX.split(sizes)), batch_first=True).transpose(1, 2).contiguous()

    def join(self, x_MHX: Tensor, x_kHLX: Tensor) -> None:
        """Write them back into x."""
        rows_kLHX, x_mHX = x_kHLX.transpose(1, 2), x_MHX[self.tokens]
        if len(x_mHX) == len(rows_kLHX) * rows_kLHX.shape[1]:
            x_mHX.unflatten(0, rows_kLHX.shape[:2]).copy_(rows_kLHX)
        else:
            torch.cat([row[: chunk.tokens] for row, chunk in zip(rows_kLHX, self.chunks, strict=True)], out=x_mHX)

    def scan(self, sums: "_Sums", initial_nHSE: Tensor, state_HSE: Tensor) -> tuple[Tensor, Tensor]:
        """The states before and after each chunk, [k, H, S, E], from that before the first one."""
        before, after = [], []
        for chunk, faded_H11, sums_HSE in zip(self.chunks, sums.faded_kH11, sums.total_kHSE, strict=True):
            before.append(initial_nHSE[chunk.document] if chunk.is_first else state_HSE)
            state_HSE = torch.addcmul(sums_HSE, faded_H11, before[-1])
            after.append(state_HSE)
        return torch.stack(before), torch.stack(after)


def _groups(lengths: Sequence[int], heads: int) -> Iterator[_Group]:
    chunks = [
        _Chunk(n, min(SLOT_CHUNK_TOKENS, length - start), start == 0, start + SLOT_CHUNK_TOKENS >= length)
        for n, length in enumerate(lengths)
        for start in range(0, length, SLOT_CHUNK_TOKENS)
    ]
    at_once, start = max(1, SLOT_GROUP_ELEMENTS // (heads * SLOT_CHUNK_TOKENS**2)), 0
    for k in range(0, len(chunks), at_once):
        group = tuple(chunks[k : k + at_once])
        end = start + sum(chunk.tokens for chunk in group)
        yield _Group(slice(start, end), group)
        start = end


class _Decays:
    """ρ^(i − j) from the token j that writes to the token i that reads, and from the chunk's start."""

    def __init__(self, log_decay_H: Tensor, lengths: Sequence[int]):
        L = min(SLOT_CHUNK_TOKENS, max(lengths))
        token_L = torch.arange(L, device=log_decay_H.device)
        age_LL = token_L[:, None] - token_L
        self.log_H, self.running_H = log_decay_H, log_decay_H.to(running_dtype(log_decay_H.device))
        self.mask_HLL = (log_decay_H[:, None, None] * age_LL).masked_fill(age_LL < 0, -torch.inf).exp()
        self.since_L1 = (token_L + 1)[:, None]
        self.faded_HL1 = (log_decay_H[:, None, None] * self.since_L1).exp()
        self.age_LL = age_LL.clamp_min(0)
        self.aged_HLL = self.age_LL * self.mask_HLL


class _Sums:
    """The sums that the chunks of a group add to M and N by their end, [k, H, S, E], in the dtype of running sums."""

    def __init__(self, write_kHLS: Tensor, value_kHLD: Tensor, group: _Group, decays: _Decays):
        tokens_k1 = int64_tensor(tuple(chunk.tokens for chunk in group.chunks), write_kHLS.device)[:, None]
        token_L = torch.arange(write_kHLS.shape[2], device=write_kHLS.device)
        self.left_k1L = (tokens_k1 - 1 - token_L).clamp_min(0)[:, None]
        self.faded_kHL1 = (decays.log_H[:, None] * self.left_k1L).exp()[..., None]
        self.value, self.written = value_kHLD, write_kHLS * self.faded_kHL1
        self.total_kHSE = _joined(self.written.mT @ value_kHLD, self.written.sum(2), decays)
        self.faded_kH11 = (tokens_k1 * decays.running_H).exp()[..., None, None]

    def backward(self, d_total_kHSE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of write, value and log ρ."""
        d_total_kHSE = d_total_kHSE.to(self.value.dtype)
        d_memory, d_mass = d_total_kHSE[..., :-1], d_total_kHSE[..., None, :, -1]
        d_written = (self.value @ d_memory.mT).add_(d_mass)
        d_log_decay_H = (self.left_k1L * torch.linalg.vecdot(d_written, self.written)).sum((0, 2))
        return d_written.mul_(self.faded_kHL1), self.written @ d_memory, d_log_decay_H


class _Read:
    """The values that the chunks of a group read, with the tensors that both passes need."""

    def __init__(self, read: Tensor, write: Tensor, value: Tensor, before_kHSE: Tensor, decays: _Decays):
        L = read.shape[2]
        self.mask_HLL, self.faded_HL1 = decays.mask_HLL[:, :L, :L], decays.faded_HL1[:, :L]
        self.decays = decays
        # A dense product would carry a NaN to earlier tokens, as 0 · NaN. It is added to the later tokens instead.
        broken_kHL = 0 * (write.sum(-1) + value.sum(-1))
        self.broken_kHL = broken_kHL if not value.is_cpu or not bool(broken_kHL.sum().isfinite()) else None
        if self.broken_kHL is not None:
            write, value = (x.where(x.isfinite(), 0) for x in (write, value))
        self.write, self.value, before_kHSE = write, value, before_kHSE.to(value.dtype)
        self.memory, self.mass_before = before_kHSE[..., :-1], before_kHSE[..., None, :, -1]
        self.mass = _weighted(self.mask_HLL, write).add_(self.faded_HL1 * self.mass_before).add_(MASS_FLOOR)
        self.share = read / self.mass
        self.faded_share = self.faded_HL1 * self.share
        self.product_kHLL = self.share @ write.mT

    def output(self) -> Tensor:
        """y, [k, H, L, D]; overwrites the products."""
        y_kHLD = (self.product_kHLL.mul_(self.mask_HLL) @ self.value).add_(self.faded_share @ self.memory)
        return y_kHLD if self.broken_kHL is None else y_kHLD + self.broken_kHL.cumsum(-1)[..., None]

    def backward(self, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The gradients of read, write, value, the states before and log ρ; overwrites the products."""
        L, decays = dy.shape[2], self.decays
        d_product = (dy @ self.value.mT).mul_(self.mask_HLL)
        from_memory = (dy @ self.memory.mT).mul_(self.faded_HL1)
        d_read = (d_product @ self.write).add_(from_memory).div_(self.mass)
        d_mass = -d_read * self.share
        d_write = (d_product.mT @ self.share).add_(_weighted(self.mask_HLL.mT, d_mass))
        # d log ρ: each term times the tokens between writing and reading
        passed = from_memory.mul_(self.share).addcmul_(d_mass, self.faded_HL1 * self.mass_before)
        aged = d_mass * _weighted(decays.aged_HLL[:, :L, :L], self.write)
        d_log_decay_H = passed.mul_(decays.since_L1[:L]).add_(aged).sum((0, 2, 3))
        d_product_sums_HLL = torch.linalg.vecdot(d_product, self.product_kHLL, dim=0)
        d_log_decay_H += (decays.age_LL[:L, :L] * d_product_sums_HLL).sum((1, 2))
        d_value = self.product_kHLL.mul_(self.mask_HLL).mT @ dy
        d_before = _joined(self.faded_share.mT @ dy, d_mass.mul_(self.faded_HL1).sum(2), decays)
        return d_read, d_write, d_value, d_before, d_log_decay_H


def _joined(memory_kHSD: Tensor, mass_kHS: Tensor, decays: _Decays) -> Tensor:
    """[k, H, S, E] in the dtype of running sums."""
    D = memory_kHSD.shape[-1]
    joined = memory_kHSD.new_empty(*mass_kHS.shape, D + 1, dtype=decays.running_H.dtype)
    joined[..., :D], joined[..., D] = memory_kHSD, mass_kHS
    return joined


def _weighted(weight_Hij: Tensor, x_kHjX: Tensor) -> Tensor:
    """Σ_j weight · x, [k, H, i, X], without a copy of the weights for each chunk."""
    return torch.einsum("hij,khjx->khix", weight_Hij, x_kHjX)
