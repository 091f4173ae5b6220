"""Bidirectional Token Statistics Self-Attention, the operator of the paper: every token reads its whole document.

Source: arXiv 2412.17810. Sums run over all tokens of a document, and a token's output needs those of its document only.
The backward is derived from the formulas. With D = S2/N′, N′ = N + 1e-8, a = 1/(1 + D) and s = w²/S1:

    R2 = a²·Σ dy·w·Π / N′          RN = −Σ_d R2·D
    dΠ = Σ_d (R2·w² − dy·w·a) + RN          dz = Π·(dΠ − Σ_h Π·dΠ)          E = Σ dz·s
    dw = −dy·Π·a + 2w·(Π·R2 + temp·(dz − E)/S1)          d temp = Σ_d E

E is the mean of dz with the weights s, which add up to 1 over the tokens: where one token has all the energy of a
channel, dz − E is exactly 0. Where S1 is at its floor, it is constant, and E is 0 in dw.

Shapes: M = B·T tokens of a flat sequence, H heads, D channels a head, N documents (N = B unless packed).
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.mixers.tssa import bidirectional_chunked
from tost_lm.mixers.tssa.autograd import one_thread
from tost_lm.mixers.tssa.backends import obstacle_to_triton
from tost_lm.mixers.tssa.naive import NORM_FLOOR
from tost_lm.mixers.tssa.phases import LocalSoftmax
from tost_lm.ops.layout import Layout, LocalDocuments, document_layout
from tost_lm.ops.precision import MASS_FLOOR, statistics_dtype


def tssa(
    w: Tensor,
    temp: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    heads: HeadSoftmax | None = None,
) -> Tensor:
    """Bidirectional TSSA (arXiv 2412.17810).

    With sums over the tokens of a document: S1 = Σ w² in each channel, at least 1e-24; z = temp·Σ_d w²/S1;
    Π = softmax over heads of z; y = −Π·w / (1 + ΣΠw² / (ΣΠ + 1e-8)). The order of a document's tokens does not matter.

    The backends agree in outputs and gradients. Both compute statistics, scores and memberships in float32 (float64 for
    float64 inputs), under autocast too, and store w, Π and statistics of the documents for the backward:
        `triton`: fused kernels, for CUDA tensors in float32, bfloat16 or float16 of up to 64 heads of up to 256
            channels. The default for these when Triton is installed.
        `chunked`: PyTorch, chunk by chunk, on every device and in every dtype. The default for everything else. Each
            packed document needs its own chunks, but documents of equal length share them.

    Args:
        w: [B, T, H, D], T ≥ 1, any floating dtype.
        temp: [H].
        cu_seqlens: int32 [N + 1], offsets of N packed documents; needs B == 1 and covers T. Serve padded batches by
            packing them: padding is then no token. None: each row is a document. Keep it on the host: each call reads
            it.
        backend: `triton` or `chunked`; None: the default.
        heads: w holds some of the heads, other ranks the rest (`tost_lm.parallel.tensor`). H counts the heads of w.

    Returns:
        y [B, T, H, D] in w's dtype.

    Raises:
        ValueError: shapes that do not fit, an unknown backend, or a backend that cannot run this call.
    """
    if w.dim() != 4 or 0 in w.shape or not w.is_floating_point():
        raise ValueError(f"w must be floating point [B, T, H, D] with no size 0, got {w.dtype} {list(w.shape)}")
    B, T, H, D = w.shape
    if temp.shape != (H,):
        raise ValueError(f"temp must be [H] = [{H}], got {list(temp.shape)}")
    kernels = _choose(backend, w)
    local = LocalDocuments.of(cu_seqlens, B, T, None)
    layout = document_layout(local.offsets, kernels.chunk_tokens(H, D, w.device), w.device)
    with torch.autocast(w.device.type, enabled=False):
        w_MHD = w.reshape(B * T, H, D).contiguous()
        y_MHD = _Tssa.apply(kernels, layout, heads or LocalSoftmax(), w_MHD, temp.to(statistics_dtype(w)))
    return y_MHD.view(B, T, H, D)  # pyright: ignore[reportAttributeAccessIssue]


class Kernels(Protocol):
    """A module with these functions: sums over the tokens of each document, and functions of each token and them.

    All sums are in the statistics dtype of w.
    """

    def chunk_tokens(self, heads: int, channels: int, device: torch.device) -> int:
        """Tokens in each chunk of the layout."""
        ...

    def energy(self, w_MHD: Tensor, layout: Layout) -> Tensor:
        """Σ w², [N, H, D]."""
        ...

    def scores(self, w_MHD: Tensor, layout: Layout, energy_NHD: Tensor, temp_H: Tensor) -> Tensor:
        """z = temp·Σ_d w²/S1, [M, H]."""
        ...

    def weighted_shares(self, w_MHD: Tensor, layout: Layout, energy_NHD: Tensor, x_MH: Tensor) -> tuple[Tensor, Tensor]:
        """Σ x·w²/S1 [N, H, D], and Σ x [N, H]. The quotient is rounded once, so that 1 is exact."""
        ...

    def output(self, w_MHD: Tensor, layout: Layout, pi_MH: Tensor, moment_NHD: Tensor) -> Tensor:
        """y = −Π·w / (1 + D), [M, H, D] in w's dtype."""
        ...

    def output_backward(self, dy_MHD: Tensor, w_MHD: Tensor, layout: Layout, pi_MH: Tensor) -> Tensor:
        """Σ dy·w·Π, [N, H, D]."""
        ...

    def memberships_backward(
        self,
        dy_MHD: Tensor,
        w_MHD: Tensor,
        layout: Layout,
        moment_NHD: Tensor,
        d_weighted_NHD: Tensor,
        d_mass_NH: Tensor,
    ) -> Tensor:
        """dΠ = Σ_d (R2·w² − dy·w / (1 + D)) + RN, [M, H]."""
        ...

    def token_gradient(
        self,
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
        """dw = −dy·Π / (1 + D) + w·(2·Π·R2 + scale·(dz − E)), [M, H, D] in w's dtype."""
        ...


def _choose(name: str | None, w: Tensor) -> Kernels:
    if name not in (None, "triton", "chunked"):
        raise ValueError(f"unknown backend: {name!r}; use one of triton, chunked, or None for the default")
    if name == "chunked" or (name is None and not w.is_cuda):
        return bidirectional_chunked
    if obstacle := obstacle_to_triton(w):
        if name is None:
            return bidirectional_chunked
        raise ValueError(f"backend {name!r} cannot run here: {obstacle}; use None for the default")
    from tost_lm.mixers.tssa.triton import bidirectional  # an optional package, and slow to import

    return bidirectional


class _Tssa(torch.autograd.Function):
    """apply(kernels, layout, softmax, w_MHD, temp_H) → y_MHD."""

    @staticmethod
    def forward(ctx, kernels: Kernels, layout: Layout, softmax: HeadSoftmax, w_MHD: Tensor, temp_H: Tensor):
        with one_thread(w_MHD.device):
            energy_NHD = kernels.energy(w_MHD, layout).clamp_min_(NORM_FLOOR**2)
            pi_MH = softmax.forward(kernels.scores(w_MHD, layout, energy_NHD, temp_H))
            weighted_NHD, mass_NH = kernels.weighted_shares(w_MHD, layout, energy_NHD, pi_MH)
            mass_NH1 = mass_NH.add_(MASS_FLOOR)[..., None]
            moment_NHD = weighted_NHD.mul_(energy_NHD).div_(mass_NH1)
            y_MHD = kernels.output(w_MHD, layout, pi_MH, moment_NHD)
        ctx.save_for_backward(w_MHD, temp_H, pi_MH, energy_NHD, moment_NHD, mass_NH1)
        ctx.kernels, ctx.layout, ctx.softmax = kernels, layout, softmax
        return y_MHD

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_MHD: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        w_MHD, temp_H, pi_MH, energy_NHD, moment_NHD, mass_NH1 = ctx.saved_tensors
        kernels, layout, dy_MHD = ctx.kernels, ctx.layout, dy_MHD.contiguous()
        with torch.autocast(w_MHD.device.type, enabled=False), one_thread(w_MHD.device):
            product_NHD = kernels.output_backward(dy_MHD, w_MHD, layout, pi_MH)
            d_weighted_NHD = product_NHD / ((1 + moment_NHD).square_() * mass_NH1)
            d_mass_NH = -(d_weighted_NHD * moment_NHD).sum(-1)
            d_pi_MH = kernels.memberships_backward(dy_MHD, w_MHD, layout, moment_NHD, d_weighted_NHD, d_mass_NH)
            d_z_MH = ctx.softmax.backward(pi_MH, d_pi_MH)
            mean_d_z_NHD, _ = kernels.weighted_shares(w_MHD, layout, energy_NHD, d_z_MH)
            d_temp_H = mean_d_z_NHD.sum((0, 2))
            mean_d_z_NHD.masked_fill_(energy_NHD <= NORM_FLOOR**2, 0)
            scale_NHD = 2 * temp_H[:, None] / energy_NHD
            dw_MHD = kernels.token_gradient(
                dy_MHD, w_MHD, layout, pi_MH, d_z_MH, moment_NHD, d_weighted_NHD, mean_d_z_NHD, scale_NHD
            )
        return None, None, None, dw_MHD, d_temp_H
