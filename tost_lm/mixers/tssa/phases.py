"""Causal TSSA in phases: the functions of a backend between the points where ranks communicate, and the differentiable
operator that is built from them, with sums over the tokens of other ranks in between.

Phases exchange sums over tokens only. A carry (from an initial state or another rank) is added to these sums, and the
softmax over heads includes heads on other ranks. Both happen outside the kernels.

    forward    energy ─ carry S1 → memberships ─ carry S2, N → output
    backward   output_backward ─ carry R2, RN → memberships_backward ─ carry R1 → energy_backward

There are two exchanges forward and two backward, each no longer than a document's statistics. The next phase needs the
whole result, so an exchange starts as soon as a phase has its sums. The sums stored for the backward include the
received ones, so the backward repeats no exchange.

A backend is a module with the functions of `chunked`. Shapes: M = B·T tokens of a flat sequence, H heads, D channels a
head, N documents, K chunks (`Layout`). Statistics, scores and memberships are float32, or float64 for float64 inputs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.ops.exchange import exclusive_scan
from tost_lm.ops.layout import Layout, LocalDocuments, SequenceShard


class Inputs(NamedTuple):
    """What all phases read. The scores are z = temp · Σ_d (w²/S1 + bias)."""

    w_MHD: Tensor
    layout: Layout
    temp_H: Tensor
    bias_BHT: Tensor | None
    """Any strides, so an expanded view needs no copy. Token m of the flat sequence is [m // T, :, m % T]."""
    softmax: HeadSoftmax | None = None
    """None: the softmax over the heads of this rank, in the same pass."""


class Stored(NamedTuple):
    """What the forward computes for the backward."""

    pi_MH: Tensor
    energy_KHD: Tensor
    """S1 before each chunk; likewise S2 and N."""
    weighted_KHD: Tensor
    mass_KH: Tensor


class Sums(NamedTuple):
    """Sums over the tokens of this call: before (backward: after) each chunk of a document, and over each document."""

    chunk: Tensor
    """The exclusive prefix sum over the document's earlier chunks (backward: the exclusive suffix sum over its later
    chunks), [K, H, D] or [K, H]."""
    document: Tensor
    """[N, H, D] or [N, H]."""

    def with_carry(self, carry_N: Tensor | None, layout: Layout) -> Tensor:
        """`chunk` plus the carry of each chunk's document, [K, …]; None: 0."""
        if carry_N is None:
            return self.chunk
        return self.chunk + (carry_N if layout.documents == 1 else carry_N[layout.document_K])


def carries(
    shard: SequenceShard | None,
    local: LocalDocuments,
    outside_N: Sequence[Tensor],
    *here_n: Tensor,
    reverse: bool = False,
) -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
    """The sums before (with `reverse`: after) each document's tokens here, and over the whole documents, given those
    outside the sequence and those over the tokens here. Without `outside_N`, which is then 0, the sums over whole
    documents are left out, and None stands for 0.

    Args:
        shard: None: all tokens are here.
    """
    if shard is None:
        if not outside_N:
            return [None] * len(here_n), []
        return outside_N, [x + here.to(x.dtype) for x, here in zip(outside_N, here_n, strict=True)]
    joined_nC = torch.cat([here.flatten(1) for here in here_n], 1)
    sum_nC, total_NC = exclusive_scan(shard, local, joined_nC, reverse=reverse, per_document=bool(outside_N))
    sizes = [here[0].numel() for here in here_n]
    sums = [x.reshape_as(here) for x, here in zip(sum_nC.split(sizes, 1), here_n, strict=True)]
    if total_NC is None:
        return sums, []
    totals = [outside + x.view_as(outside) for outside, x in zip(outside_N, total_NC.split(sizes, 1), strict=True)]
    return [x[local.documents] + here for x, here in zip(outside_N, sums, strict=True)], totals


class CausalTssa(torch.autograd.Function):
    """apply(backend, scan, layout, softmax, w_MHD, temp_H, bias_BHT, energy, …) → y, energy, …

    The statistics have a row for each of the N documents of the whole sequences. Without statistics, none are returned.
    `scan` is `carries` for these documents; None: all tokens and heads are here, and the backend runs its phases in one
    pass over the chunks (`all_phases`).
    """

    @staticmethod
    def forward(ctx, backend: ModuleType, scan, layout: Layout, softmax, w_MHD, temp_H, bias_BHT, *initial):
        inputs = Inputs(w_MHD, layout, temp_H, bias_BHT, softmax)
        if scan is None:
            y_MHD, stored, finals = backend.all_phases(inputs, initial)
        else:
            y_MHD, stored, finals = _in_phases(backend, scan, inputs, initial)
        ctx.save_for_backward(w_MHD, temp_H, bias_BHT, *stored)
        ctx.backend, ctx.scan, ctx.layout, ctx.softmax = backend, scan, layout, softmax
        return y_MHD, *finals

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_MHD, *d_final):  # pyright: ignore[reportIncompatibleMethodOverride]
        w_MHD, temp_H, bias_BHT, *stored = ctx.saved_tensors
        inputs, stored = Inputs(w_MHD, ctx.layout, temp_H, bias_BHT, ctx.softmax), Stored(*stored)
        with torch.autocast(w_MHD.device.type, enabled=False):
            in_phases = partial(_backward_in_phases, ctx.backend, ctx.scan)
            run = ctx.backend.all_phases_backward if ctx.scan is None else in_phases
            dw_MHD, d_z_MH, d_temp_H, d_initial = run(dy_MHD.contiguous(), inputs, stored, d_final)
            d_bias_BHT = None
            if bias_BHT is not None:
                B, _, T = bias_BHT.shape
                d_bias_MH = w_MHD.shape[-1] * temp_H * d_z_MH
                d_bias_BHT = d_bias_MH.unflatten(0, (B, T)).transpose(1, 2)
        return None, None, None, None, dw_MHD, d_temp_H, d_bias_BHT, *d_initial


def _in_phases(
    backend: ModuleType, scan: Callable[..., Any], inputs: Inputs, initial: Sequence[Tensor]
) -> tuple[Tensor, Stored, list[Tensor]]:
    """y, what the backward reads, and the final statistics."""
    layout = inputs.layout
    energy: Sums = backend.energy(inputs)
    [energy_n], final_energy = scan(initial[:1], energy.document)
    energy_KHD = energy.with_carry(energy_n, layout)
    pi_MH, weighted, mass = backend.memberships(inputs, energy_KHD)
    [weighted_n, mass_n], finals = scan(initial[1:], weighted.document, mass.document)
    stored = Stored(pi_MH, energy_KHD, weighted.with_carry(weighted_n, layout), mass.with_carry(mass_n, layout))
    return backend.output(inputs, stored), stored, [*final_energy, *finals]


def _backward_in_phases(
    backend: ModuleType, scan: Callable[..., Any], dy_MHD: Tensor, inputs: Inputs, stored: Stored,
    d_final: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """The gradients of w, of the scores, of temp and of the initial statistics."""
    layout = inputs.layout
    d_weighted, d_mass = backend.output_backward(dy_MHD, inputs, stored)
    here_n = d_weighted.document, d_mass.document
    [d_weighted_n, d_mass_n], d_initials = scan(d_final[1:], *here_n, reverse=True)
    d_weighted_KHD, d_mass_KH = d_weighted.with_carry(d_weighted_n, layout), d_mass.with_carry(d_mass_n, layout)
    d_z_MH, d_temp_H, d_energy = backend.memberships_backward(dy_MHD, inputs, stored, d_weighted_KHD, d_mass_KH)
    [d_energy_n], d_energy_N = scan(d_final[:1], d_energy.document, reverse=True)
    d_energy_KHD = d_energy.with_carry(d_energy_n, layout)
    dw_MHD = backend.energy_backward(dy_MHD, inputs, stored, d_z_MH, d_energy_KHD, d_weighted_KHD)
    return dw_MHD, d_z_MH, d_temp_H, [*d_energy_N, *d_initials]


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
