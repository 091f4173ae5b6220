"""The kernels of bidirectional TSSA in PyTorch, chunk by chunk; see `bidirectional.Kernels`.

Sums over chunks are float64. A chunk of one document is [1, t, H, D], one of r documents of t tokens each [r, t, H, D].
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from tost_lm.mixers.tssa.chunked import Scratch
from tost_lm.mixers.tssa.chunked import chunk_tokens as chunk_tokens
from tost_lm.ops.layout import Layout
from tost_lm.ops.precision import running_dtype, statistics_dtype


def energy(w_MHD: Tensor, layout: Layout) -> Tensor:
    total_NHD = _zeros(w_MHD, layout)
    for chunk in _chunks(w_MHD, layout):
        w = chunk.read(w_MHD)
        total_NHD[chunk.documents] += chunk.product(w, w).sum(1)
    return total_NHD.to(statistics_dtype(w_MHD))


def scores(w_MHD: Tensor, layout: Layout, energy_NHD: Tensor, temp_H: Tensor) -> Tensor:
    z_MH = w_MHD.new_empty(w_MHD.shape[:2], dtype=temp_H.dtype)
    for chunk in _chunks(w_MHD, layout):
        w = chunk.read(w_MHD)
        share = chunk.product(w, w).div_(chunk.of_documents(energy_NHD))
        chunk.of_tokens(z_MH).copy_(share.sum(-1))
    return z_MH.mul_(temp_H)


def weighted_shares(w_MHD: Tensor, layout: Layout, energy_NHD: Tensor, x_MH: Tensor) -> tuple[Tensor, Tensor]:
    total_NHD = _zeros(w_MHD, layout)
    total_NH = torch.zeros_like(total_NHD[..., 0])
    for chunk in _chunks(w_MHD, layout):
        w, x = chunk.read(w_MHD), chunk.of_tokens(x_MH)
        share = chunk.product(w, w).div_(chunk.of_documents(energy_NHD))
        total_NHD[chunk.documents] += share.mul_(x[..., None]).sum(1)
        total_NH[chunk.documents] += x.sum(1)
    return total_NHD.to(x_MH.dtype), total_NH.to(x_MH.dtype)


def output(w_MHD: Tensor, layout: Layout, pi_MH: Tensor, moment_NHD: Tensor) -> Tensor:
    y_MHD, factor_NHD = torch.empty_like(w_MHD), -1 / (1 + moment_NHD)
    for chunk in _chunks(w_MHD, layout):
        y = chunk.product(chunk.read(w_MHD), chunk.of_tokens(pi_MH)[..., None])
        chunk.of_tokens(y_MHD).copy_(y.mul_(chunk.of_documents(factor_NHD)))
    return y_MHD


def output_backward(dy_MHD: Tensor, w_MHD: Tensor, layout: Layout, pi_MH: Tensor) -> Tensor:
    total_NHD = _zeros(w_MHD, layout)
    for chunk in _chunks(w_MHD, layout):
        product = chunk.product(chunk.read(dy_MHD), chunk.read(w_MHD)).mul_(chunk.of_tokens(pi_MH)[..., None])
        total_NHD[chunk.documents] += product.sum(1)
    return total_NHD.to(pi_MH.dtype)


def memberships_backward(
    dy_MHD: Tensor, w_MHD: Tensor, layout: Layout, moment_NHD: Tensor, d_weighted_NHD: Tensor, d_mass_NH: Tensor
) -> Tensor:
    d_pi_MH, factor_NHD = w_MHD.new_empty(w_MHD.shape[:2], dtype=moment_NHD.dtype), -1 / (1 + moment_NHD)
    for chunk in _chunks(w_MHD, layout):
        w = chunk.read(w_MHD)
        terms = chunk.product(w, chunk.of_documents(d_weighted_NHD))
        terms.addcmul_(chunk.read(dy_MHD), chunk.of_documents(factor_NHD)).mul_(w)
        chunk.of_tokens(d_pi_MH).copy_(terms.sum(-1).add_(chunk.of_documents(d_mass_NH)))
    return d_pi_MH


def token_gradient(
    dy_MHD: Tensor,
    w_MHD: Tensor,
    layout: Layout,
    pi_MH: Tensor,
    d_z_MH: Tensor,
    moment_NHD: Tensor,
    d_weighted_NHD: Tensor,
    mean_d_z_NHD: Tensor,
    scale_NHD: Tensor,
) -> Tensor:
    dw_MHD, factor_NHD = torch.empty_like(w_MHD), -1 / (1 + moment_NHD)
    for chunk in _chunks(w_MHD, layout):
        pi, d_z = chunk.of_tokens(pi_MH)[..., None], chunk.of_tokens(d_z_MH)[..., None]
        dw = torch.sub(d_z, chunk.of_documents(mean_d_z_NHD), out=chunk.new()).mul_(chunk.of_documents(scale_NHD))
        dw.addcmul_(pi, chunk.of_documents(d_weighted_NHD), value=2).mul_(chunk.read(w_MHD))
        through_y = chunk.product(chunk.read(dy_MHD), pi)
        chunk.of_tokens(dw_MHD).copy_(dw.addcmul_(through_y, chunk.of_documents(factor_NHD)))
    return dw_MHD


class _Chunk:
    """Some tokens of one document, or all tokens of several documents of equal length."""

    def __init__(self, documents: slice, tokens: slice, scratch: Scratch):
        self.documents = documents
        self._tokens, self._scratch = tokens, scratch
        self._shape = documents.stop - documents.start, -1

    def of_tokens(self, x_M: Tensor) -> Tensor:
        """A view [r, t, …]."""
        return x_M[self._tokens].unflatten(0, self._shape)

    def of_documents(self, x_N: Tensor) -> Tensor:
        """[r, 1, …]."""
        return x_N[self.documents, None]

    def new(self) -> Tensor:
        """An uninitialised tensor [r, t, H, D] in the statistics dtype, valid until the next chunk."""
        return self._scratch.empty(self._tokens.stop - self._tokens.start).unflatten(0, self._shape)

    def read(self, x_MHD: Tensor) -> Tensor:
        """The chunk's tokens in the statistics dtype; do not modify them."""
        x = self.of_tokens(x_MHD)
        return x if x.dtype == statistics_dtype(x) else self.new().copy_(x)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.mul(x, y, out=self.new())


def _chunks(w_MHD: Tensor, layout: Layout) -> Iterator[_Chunk]:
    """The next chunk reuses the scratch memory of this one."""
    scratch, N = Scratch(w_MHD, layout), layout.documents
    lengths = {end - start for start, end in pairwise(layout.offsets)}
    T = max(lengths)
    if len(lengths) == 1 and layout.chunk_tokens >= T:
        rows = layout.chunk_tokens // T
        ranges = [(n, min(n + rows, N), n * T, min(n + rows, N) * T) for n in range(0, N, rows)]
    else:
        of_chunks = zip(layout.document_K.tolist(), layout.start_K.tolist(), layout.end_K.tolist(), strict=True)
        ranges = [(n, n + 1, start, end) for n, start, end in of_chunks]
    for first, last, start, end in ranges:
        scratch.reset()
        yield _Chunk(slice(first, last), slice(start, end), scratch)


def _zeros(w_MHD: Tensor, layout: Layout) -> Tensor:
    return w_MHD.new_zeros(layout.documents, *w_MHD.shape[1:], dtype=running_dtype(w_MHD.device))
