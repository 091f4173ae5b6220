"""Slot memory in chunks of tokens: a sum over each chunk, a scan over the chunks of a document, and the read.

Shapes as in `tost_lm.ops.slots`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from tost_lm.ops.naive import MASS_FLOOR, running_dtype
from tost_lm.ops.sequence_shard import LocalDocuments

CHUNK_TOKENS = 64
READ_ELEMENTS = 2**20
"""Elements of the [L, L] masks of the chunks that are read at once: they fit into a core's cache."""


@dataclass(frozen=True)
class Chunks:
    """The chunks of the n documents on this rank, document after document; the last of each is padded with zeros."""

    tokens: int
    """L."""
    lengths: tuple[int, ...]
    """Tokens of each document."""

    @classmethod
    def of(cls, local: LocalDocuments) -> "Chunks":
        return cls(min(CHUNK_TOKENS, max(local.lengths)), local.lengths)

    @property
    def counts(self) -> tuple[int, ...]:
        """Chunks of each document."""
        return tuple(-(-length // self.tokens) for length in self.lengths)

    def split(self, x_BTHX: Tensor) -> Tensor:
        """[K, H, L, X]."""
        flat_MHX = x_BTHX.flatten(0, 1)
        if len(set(self.lengths)) == 1:
            rows = flat_MHX.unflatten(0, (len(self.lengths), -1))
            x = pad(rows, (0, 0, 0, 0, 0, -self.lengths[0] % self.tokens)).flatten(0, 1)
        else:
            documents = flat_MHX.split(self.lengths)
            x = torch.cat([pad(d, (0, 0, 0, 0, 0, -len(d) % self.tokens)) for d in documents])
        return x.unflatten(0, (-1, self.tokens)).transpose(1, 2)

    def join(self, x_KHLX: Tensor, rows: Sequence[int]) -> Tensor:
        """The inverse of `split`: [B, T, H, X] with `rows` = (B, T)."""
        flat = x_KHLX.transpose(1, 2).flatten(0, 1)
        if len(set(self.lengths)) == 1:
            documents = flat.unflatten(0, (len(self.lengths), -1))[:, : self.lengths[0]].flatten(0, 1)
        else:
            padded = flat.split([count * self.tokens for count in self.counts])
            documents = torch.cat([x[:length] for x, length in zip(padded, self.lengths, strict=True)])
        return documents.unflatten(0, (rows[0], rows[1]))

    def length_of_each(self, device: torch.device) -> Tensor:
        """Tokens of each chunk, [K]."""
        sizes = [min(self.tokens, length - start) for length in self.lengths for start in range(0, length, self.tokens)]
        return torch.tensor(sizes, device=device)

    def sums(self, write_KHLS: Tensor, value_KHLD: Tensor, log_decay_H: Tensor) -> Tensor:
        """What each chunk adds to M and N by its end, [K, H, S, E]."""
        L = write_KHLS.shape[2]
        left_KL = self.length_of_each(write_KHLS.device)[:, None] - 1 - torch.arange(L, device=write_KHLS.device)
        faded_KHL = (log_decay_H[:, None] * left_KL.clamp_min(0)[:, None]).exp()
        faded_KHSL = (write_KHLS * faded_KHL[..., None]).mT
        return torch.cat([faded_KHSL @ value_KHLD, faded_KHSL.sum(-1, keepdim=True)], -1)

    def read(
        self, read_KHLS: Tensor, write_KHLS: Tensor, value_KHLD: Tensor, before_KHSE: Tensor, log_decay_H: Tensor
    ) -> Tensor:
        """y of each token, [K, H, L, D], from M and N before its chunk.

        The backward computes groups of chunks again.
        """
        H, L = read_KHLS.shape[1:3]
        at_once = max(1, READ_ELEMENTS // (H * L * L))
        before = before_KHSE.to(value_KHLD.dtype)
        parts = zip(*(x.split(at_once) for x in (read_KHLS, write_KHLS, value_KHLD, before)), strict=True)
        return torch.cat(
            [checkpoint(_read, *part, log_decay_H, use_reentrant=False, preserve_rng_state=False) for part in parts]
        )


def scan_chunks(sums_KHSE: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """M and N before each chunk, [K, H, S, E], and after each document, [n, H, S, E], in the dtype of running sums."""
    running = running_dtype(sums_KHSE.device)
    before, final = _Scan.apply(sums_KHSE.to(running), initial_nHSE, log_decay_H.to(running), chunks)  # pyright: ignore[reportGeneralTypeIssues]
    return before, final


class _Scan(torch.autograd.Function):
    """state_{c + 1} = ρ^length_c · state_c + sums_c, over the chunks of each document.

    Step c has chunk c of all documents that have one. Documents are sorted by length for it, so they come first.
    """

    @staticmethod
    def forward(ctx, sums_KHSE: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor, chunks: Chunks):
        order, steps = _steps(chunks, sums_KHSE.device)
        lengths_K = chunks.length_of_each(sums_KHSE.device)
        decay_KH = (lengths_K[:, None] * log_decay_H).exp()
        state = initial_nHSE[order]
        before_KHSE = torch.empty_like(sums_KHSE)
        for chunk in steps:
            before_KHSE[chunk] = state[: len(chunk)]
            new = decay_KH[chunk][..., None, None] * state[: len(chunk)] + sums_KHSE[chunk]
            state = torch.cat([new, state[len(chunk) :]]) if len(chunk) < len(state) else new
        final = torch.empty_like(state)
        final[order] = state
        ctx.save_for_backward(before_KHSE, decay_KH, lengths_K)
        ctx.chunks = chunks
        return before_KHSE, final

    @staticmethod
    def backward(ctx, d_before_KHSE: Tensor, d_final: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        before_KHSE, decay_KH, lengths_K = ctx.saved_tensors
        order, steps = _steps(ctx.chunks, d_before_KHSE.device)
        d_state = d_final[order]
        d_sums_KHSE = torch.empty_like(d_before_KHSE)
        for chunk in reversed(steps):
            d_sums_KHSE[chunk] = d_state[: len(chunk)]
            new = decay_KH[chunk][..., None, None] * d_state[: len(chunk)] + d_before_KHSE[chunk]
            d_state = torch.cat([new, d_state[len(chunk) :]]) if len(chunk) < len(d_state) else new
        d_initial = torch.empty_like(d_state)
        d_initial[order] = d_state
        d_decay_KH = (d_sums_KHSE * before_KHSE).sum((-2, -1))
        return d_sums_KHSE, d_initial, (lengths_K[:, None] * decay_KH * d_decay_KH).sum(0), None


def _steps(chunks: Chunks, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The documents, most chunks first, and the chunks of each step of the scan, in this order of documents."""
    counts = chunks.counts
    firsts = [0, *accumulate(counts)]
    order = sorted(range(len(counts)), key=lambda n: -counts[n])
    steps = [
        torch.tensor([firsts[n] + step for n in order if counts[n] > step], device=device)
        for step in range(max(counts))
    ]
    return torch.tensor(order, device=device), steps


def _read(
    read_KHLS: Tensor, write_KHLS: Tensor, value_KHLD: Tensor, before_KHSE: Tensor, log_decay_H: Tensor
) -> Tensor:
    # A dense product would carry a NaN to earlier tokens, as 0 · NaN. It is added to the later tokens instead.
    broken_KHL = 0 * (write_KHLS.detach().sum(-1) + value_KHLD.detach().sum(-1))
    is_broken = not value_KHLD.is_cpu or not bool(broken_KHL.sum().isfinite())
    if is_broken:
        write_KHLS, value_KHLD = (x.where(x.isfinite(), 0) for x in (write_KHLS, value_KHLD))
    age_LL = torch.arange(read_KHLS.shape[2], device=read_KHLS.device)
    age_LL = age_LL[:, None] - age_LL
    mask_HLL = (log_decay_H[:, None, None] * age_LL).masked_fill(age_LL < 0, -torch.inf).exp()
    faded_HL1 = (log_decay_H[:, None] * (age_LL[:, :1].mT + 1)).exp()[..., None]
    memory_KHSD, mass_KH1S = before_KHSE[..., :-1], before_KHSE[..., None, :, -1]
    mass_KHLS = mask_HLL @ write_KHLS + faded_HL1 * mass_KH1S
    share_KHLS = read_KHLS / (mass_KHLS + MASS_FLOOR)
    y_KHLD = ((share_KHLS @ write_KHLS.mT) * mask_HLL) @ value_KHLD + (faded_HL1 * share_KHLS) @ memory_KHSD
    return y_KHLD + broken_KHL.cumsum(-1)[..., None] if is_broken else y_KHLD
