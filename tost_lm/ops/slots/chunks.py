"""Slot memory in chunks of tokens: a sum over each chunk, a scan over the chunks of a document, and the read.

Shapes as in `tost_lm.ops.slots`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tost_lm.ops.naive import MASS_FLOOR, running_dtype
from tost_lm.ops.sequence_shard import LocalDocuments
from tost_lm.sizes import SLOT_CHUNK_TOKENS, SLOT_SCAN_CHUNKS

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
        return cls(min(SLOT_CHUNK_TOKENS, max(local.lengths)), local.lengths)

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
        return x.unflatten(0, (-1, self.tokens)).transpose(1, 2).contiguous()

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
        """y of each token, [K, H, L, D], from M and N before its chunk."""
        return _Read.apply(read_KHLS, write_KHLS, value_KHLD, before_KHSE.to(value_KHLD.dtype), log_decay_H)  # pyright: ignore[reportReturnType]


def scan_chunks(sums_KHSE: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """M and N before each chunk, [K, H, S, E], and after each document, [n, H, S, E], in the dtype of running sums."""
    running = running_dtype(sums_KHSE.device)
    return _Scan.apply(sums_KHSE.to(running), initial_nHSE, log_decay_H.to(running), chunks)  # pyright: ignore[reportReturnType]


class _Scan(torch.autograd.Function):
    """state_{c + 1} = ρ^length_c · state_c + sums_c over the chunks of each document."""

    @staticmethod
    def forward(ctx, sums_KHSE: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor, chunks: Chunks):
        before_KHSE = _before(sums_KHSE, initial_nHSE, log_decay_H, chunks.counts, chunks.tokens)
        _, last_n, faded_K = _ends(chunks, log_decay_H)
        ctx.save_for_backward(before_KHSE, log_decay_H)
        ctx.chunks = chunks
        return before_KHSE, faded_K[last_n] * before_KHSE[last_n] + sums_KHSE[last_n]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_before_KHSE: Tensor, d_final_nHSE: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        before_KHSE, log_decay_H = ctx.saved_tensors
        chunks = ctx.chunks
        first_n, last_n, faded_K = _ends(chunks, log_decay_H)
        d_KHSE = d_before_KHSE.index_add(0, last_n, faded_K[last_n] * d_final_nHSE)
        newest_first = _before(
            d_KHSE.flip(0), torch.zeros_like(d_final_nHSE), log_decay_H, chunks.counts[::-1], chunks.tokens
        )
        d_sums_KHSE = newest_first.flip(0).index_copy(0, last_n, d_final_nHSE)
        several_n = (first_n != last_n).view(-1, 1, 1, 1)
        d_initial_nHSE = d_KHSE[first_n] + several_n * faded_K[first_n] * d_sums_KHSE[first_n]
        lengths_K1 = chunks.length_of_each(d_KHSE.device)[:, None]
        passed_KH = (faded_K * before_KHSE * d_sums_KHSE).sum((-2, -1))
        return d_sums_KHSE, d_initial_nHSE, (lengths_K1 * passed_KH).sum(0), None


def _ends(chunks: Chunks, log_decay_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first and the last chunk of each document, [n], and the decay over each chunk, [K, H, 1, 1]."""
    device = log_decay_H.device
    last_n = torch.tensor(chunks.counts, device=device).cumsum(0) - 1
    faded_KH = (chunks.length_of_each(device)[:, None] * log_decay_H).exp()
    return torch.cat([last_n.new_zeros(1), last_n[:-1] + 1]), last_n, faded_KH[..., None, None]


def _before(sums_KHSE: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor, counts: Sequence[int], tokens: int) -> Tensor:
    """The state before each chunk, SLOT_SCAN_CHUNKS of them at once. All but the last of a document have L tokens."""
    device, log_chunk_H = sums_KHSE.device, tokens * log_decay_H
    document_K = torch.repeat_interleave(torch.tensor(counts, device=device))
    number_K = torch.cat([torch.arange(count, device=device) for count in counts])  # in its document
    before, entering = [], initial_nHSE[:1]
    for rows in torch.arange(len(sums_KHSE), device=device).split(SLOT_SCAN_CHUNKS):
        sums, document, number = sums_KHSE[rows], document_K[rows], number_K[rows]
        i = torch.arange(len(rows), device=device)
        earlier = (document[:, None] == document) & (i[:, None] > i)
        log_Hij = (log_chunk_H[:, None, None] * (i[:, None] - 1 - i)).masked_fill(~earlier, -torch.inf)
        # A row starts from the state before its document, or before the first of these rows.
        origin = initial_nHSE[document].where((number <= i)[:, None, None, None], entering)
        faded = (log_chunk_H * torch.minimum(number, i)[:, None]).exp()[..., None, None]
        before.append(_products(log_Hij, sums) + faded * origin)
        entering = log_chunk_H.exp()[:, None, None] * before[-1][-1:] + sums[-1:]
    return torch.cat(before)


def _products(log_Hij: Tensor, x_jHSE: Tensor) -> Tensor:
    """Σ_j exp(log) · x. A number that is not finite does not reach rows whose weight is 0 as 0 · NaN."""
    finite = x_jHSE.isfinite()
    if x_jHSE.is_cpu and bool(finite.all()):
        return torch.einsum("hij,jhse->ihse", log_Hij.exp(), x_jHSE)
    weighs, is_broken = (log_Hij > -torch.inf).to(x_jHSE.dtype), (~finite).to(x_jHSE.dtype)
    broken = torch.einsum("hij,jhse->ihse", weighs, is_broken) > 0
    return torch.einsum("hij,jhse->ihse", log_Hij.exp(), x_jHSE.where(finite, 0)).masked_fill(broken, torch.nan)


class _Read(torch.autograd.Function):
    """The read in closed form, some chunks at once. Its backward computes N and the shares r/N again."""

    @staticmethod
    def forward(
        ctx, read_KHLS: Tensor, write_KHLS: Tensor, value_KHLD: Tensor, before_KHSE: Tensor, log_decay_H: Tensor
    ):
        ctx.save_for_backward(read_KHLS, write_KHLS, value_KHLD, before_KHSE, log_decay_H)
        decays, y_KHLD = _Decays(log_decay_H, read_KHLS.shape[2]), torch.empty_like(value_KHLD)
        for k in _at_once(read_KHLS):
            part = _Part(decays, read_KHLS[k], write_KHLS[k], value_KHLD[k], before_KHSE[k])
            y = (part.product_kHLL * decays.mask_HLL) @ part.value + part.faded_share @ part.memory
            y_KHLD[k] = y if part.broken_kHL is None else y + part.broken_kHL.cumsum(-1)[..., None]
        return y_KHLD

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_KHLD: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs = read_KHLS, write_KHLS, value_KHLD, before_KHSE, log_decay_H = ctx.saved_tensors
        decays = _Decays(log_decay_H, read_KHLS.shape[2])
        d_read_KHLS, d_write_KHLS, d_value_KHLD, d_before_KHSE = (torch.empty_like(x) for x in inputs[:4])
        d_log_decay_H = torch.zeros_like(log_decay_H)
        for k in _at_once(read_KHLS):
            part = _Part(decays, read_KHLS[k], write_KHLS[k], value_KHLD[k], before_KHSE[k])
            dy = dy_KHLD[k]
            d_product = (dy @ part.value.mT).mul_(decays.mask_HLL)
            from_memory = decays.faded_HL1 * (dy @ part.memory.mT)
            d_share = d_product @ part.write + from_memory
            d_read_KHLS[k] = d_share / part.mass
            d_mass = -d_read_KHLS[k] * part.share
            d_write_KHLS[k] = d_product.mT @ part.share + _weighted(decays.mask_HLL.mT, d_mass)
            # d log ρ: each term times the tokens between writing and reading
            passed = from_memory * part.share + d_mass * decays.faded_HL1 * part.mass_before
            aged = d_mass * _weighted(decays.aged_HLL, part.write)
            d_log_decay_H += (decays.since_L1 * passed + aged).sum((0, 2, 3))
            d_product_sums_HLL = torch.linalg.vecdot(d_product, part.product_kHLL, dim=0)
            d_log_decay_H += (decays.age_LL * d_product_sums_HLL).sum((1, 2))
            d_value_KHLD[k] = part.product_kHLL.mul_(decays.mask_HLL).mT @ dy
            d_before_KHSE[k, ..., :-1] = part.faded_share.mT @ dy
            d_before_KHSE[k, ..., -1] = (decays.faded_HL1 * d_mass).sum(-2)
        return d_read_KHLS, d_write_KHLS, d_value_KHLD, d_before_KHSE, d_log_decay_H


class _Decays:
    """ρ^(i − j) from the token j that writes to the token i that reads, and from the chunk's start."""

    def __init__(self, log_decay_H: Tensor, L: int):
        token_L = torch.arange(L, device=log_decay_H.device)
        age_LL = token_L[:, None] - token_L
        self.mask_HLL = (log_decay_H[:, None, None] * age_LL).masked_fill(age_LL < 0, -torch.inf).exp()
        self.since_L1 = (token_L + 1)[:, None]
        self.faded_HL1 = (log_decay_H[:, None, None] * self.since_L1).exp()
        self.age_LL = age_LL.clamp_min(0)
        self.aged_HLL = self.age_LL * self.mask_HLL


class _Part:
    """Some chunks, with what both passes need of them."""

    def __init__(self, decays: _Decays, read: Tensor, write: Tensor, value: Tensor, before_kHSE: Tensor):
        # A dense product would carry a NaN to earlier tokens, as 0 · NaN. It is added to the later tokens instead.
        broken_kHL = 0 * (write.sum(-1) + value.sum(-1))
        self.broken_kHL = broken_kHL if not value.is_cpu or not bool(broken_kHL.sum().isfinite()) else None
        if self.broken_kHL is not None:
            write, value = (x.where(x.isfinite(), 0) for x in (write, value))
        self.write, self.value = write, value
        self.memory, self.mass_before = before_kHSE[..., :-1], before_kHSE[..., None, :, -1]
        self.mass = _weighted(decays.mask_HLL, write) + decays.faded_HL1 * self.mass_before + MASS_FLOOR
        self.share = read / self.mass
        self.faded_share = decays.faded_HL1 * self.share
        self.product_kHLL = self.share @ write.mT


def _weighted(weight_Hij: Tensor, x_KHjX: Tensor) -> Tensor:
    """Σ_j weight · x, [K, H, i, X], without a copy of the weights for each chunk."""
    return torch.einsum("hij,khjx->khix", weight_Hij, x_KHjX)


def _at_once(x_KHLX: Tensor) -> list[slice]:
    K, H, L = x_KHLX.shape[:3]
    step = max(1, READ_ELEMENTS // (H * L * L))
    return [slice(start, start + step) for start in range(0, K, step)]
