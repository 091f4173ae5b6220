"""Causal TSSA as one differentiable function of w, temp, bias and the initial statistics.

It stores w, Π and the sums before each chunk for the backward. Shapes as in `phases`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.function import once_differentiable

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.mixers.tssa.phases import PhasedBackend, Scoring, Statistics
from tost_lm.ops.layout import Layout


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Run torch's CPU operations in the calling thread.

    The passes in PyTorch consist of operations of 10 to 100 µs. Split over OpenMP threads, each one would end in a
    barrier, and a barrier takes milliseconds once another process uses one of the cores (`benchmarks.operator`).
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class CausalTssa(torch.autograd.Function):
    """apply(passes, layout, softmax, w_MHD, temp_H, bias_BHT, energy, …) → y, energy, …

    The statistics have a row for each of the N documents of the whole sequences. Without statistics, none are returned.
    """

    @staticmethod
    def forward(ctx, passes: PhasedBackend, layout: Layout, softmax, w_MHD, temp_H, bias_BHT, *initial):
        scoring = Scoring(temp_H, bias_BHT)
        with one_thread(w_MHD.device):
            sums = Statistics(*initial) if initial else None
            y_MHD, pi_MH, before, final = passes.forward(w_MHD, layout, scoring, sums, softmax)
        ctx.save_for_backward(w_MHD, temp_H, bias_BHT, pi_MH, *before)
        ctx.passes, ctx.layout, ctx.softmax = passes, layout, softmax
        return y_MHD, *(final or ())

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_MHD, *d_final):  # pyright: ignore[reportIncompatibleMethodOverride]
        w_MHD, temp_H, bias_BHT, pi_MH, *before = ctx.saved_tensors
        scoring = Scoring(temp_H, bias_BHT)
        with torch.autocast(w_MHD.device.type, enabled=False), one_thread(w_MHD.device):
            dw_MHD, d_z_MH, d_temp_H, d_initial = ctx.passes.backward(
                dy_MHD.contiguous(),
                w_MHD,
                ctx.layout,
                scoring,
                pi_MH,
                Statistics(*before),
                Statistics(*d_final) if d_final else None,
                ctx.softmax,
            )
            d_bias_BHT = None
            if bias_BHT is not None:
                B, _, T = bias_BHT.shape
                d_bias_MH = w_MHD.shape[-1] * temp_H * d_z_MH
                d_bias_BHT = d_bias_MH.unflatten(0, (B, T)).transpose(1, 2)
        return None, None, None, dw_MHD, d_temp_H, d_bias_BHT, *(d_initial or ())


class SoftmaxOverHeads(torch.autograd.Function):
    """apply(softmax, z_MH) → Π: a differentiable `HeadSoftmax`."""

    @staticmethod
    def forward(ctx, softmax: HeadSoftmax, z_MH):
        pi_MH = softmax.forward(z_MH)
        ctx.softmax = softmax
        ctx.save_for_backward(pi_MH)
        return pi_MH

    @staticmethod
    @once_differentiable
    def backward(ctx, d_pi_MH):  # pyright: ignore[reportIncompatibleMethodOverride]
        (pi_MH,) = ctx.saved_tensors
        return None, ctx.softmax.backward(pi_MH, d_pi_MH)
