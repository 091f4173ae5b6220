"""The public operator, causal Token Statistics Self-Attention with state in and state out, and one step of it."""

from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.mixers.tssa.phases import CausalTssa, SoftmaxOverHeads, carries
from tost_lm.mixers.tssa.statistics import TssaState, check_state, token_scores
from tost_lm.ops.backends import LOW_PRECISION, Backend, choose, obstacle_to_kernels
from tost_lm.ops.layout import LocalDocuments, SequenceShard, document_layout
from tost_lm.ops.precision import MASS_FLOOR, running_dtype, statistics_dtype


def _obstacle_to_triton(w_BTHD: Tensor) -> str | None:
    _, _, H, D = w_BTHD.shape
    if H > 64 or D > 256:
        return f"w has {H} heads of {D} channels, but its kernels support up to 64 of 256"
    return obstacle_to_kernels(w_BTHD, LOW_PRECISION, "triton")


BACKENDS = [
    Backend("triton", _obstacle_to_triton, "tost_lm.mixers.tssa.triton"),  # optional, and slow to import
    Backend("chunked", None, "tost_lm.mixers.tssa.chunked"),
]
"""Modules of phases."""


def causal_tssa(
    w: Tensor,
    temp: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: TssaState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    shard: SequenceShard | None = None,
    heads: HeadSoftmax | None = None,
) -> tuple[Tensor, TssaState | None]:
    """Causal TSSA (arXiv 2412.17810, in the released causal form).

    With w² squared channel by channel and sums over the document up to and including token t:
    S1 = Σ w²; z = temp·Σ_d(w²/S1 + bias); Π = softmax over heads of z; y = −Π·w / (1 + ΣΠw² / (ΣΠ + 1e-8)).

    The backends agree in outputs, states and gradients:
        `triton`: fused kernels, for CUDA tensors in float32, bfloat16 or float16 of up to 64 heads of up to 256
            channels. The default for these when Triton is installed.
        `chunked`: PyTorch, chunk by chunk, on every device and in every dtype. The default for everything else.
            Each packed document needs its own pass.
    Both compute statistics, scores and memberships in float32 (float64 for float64 inputs), under autocast too.

    Args:
        w: [B, T, H, D], T ≥ 1, any floating dtype.
        temp: [H].
        bias: per head and token, already gathered by position in the document: [H, T] or [B, H, T]. It is added
            inside the sum over channels, so it counts D times.
        initial_state: statistics of the tokens before these, differentiable; None: empty.
        output_final_state: return the state after the last token, differentiable; else None.
        cu_seqlens: int32 [N + 1], offsets of N packed documents; needs B == 1 and covers T. Each document starts from
            an empty state, or from its row of `initial_state`. Serve padded batches, left or right, by packing them.
            Keep it on the host: each call reads it.
        backend: `triton` or `chunked`; None: the default.
        shard: w holds a sequence shard (`tost_lm.parallel.sequence`). T is then the length of the shard, cu_seqlens
            covers the whole sequence, and a state has a row for each document of the sequence. States and their
            gradients are equal on all ranks.
        heads: w holds some of the heads, other ranks the rest (`tost_lm.parallel.tensor`). H counts the heads of w.

    Returns:
        y [B, T, H, D] in w's dtype, and the final state (N rows when packed, else B) or None. The final state is
        float64 where w or the initial state is, else float32.

    Raises:
        ValueError: shapes that do not fit, an unknown backend, or a backend that cannot run this call.
    """
    if w.dim() != 4 or 0 in w.shape or not w.is_floating_point():
        raise ValueError(f"w must be floating point [B, T, H, D] with no size 0, got {w.dtype} {list(w.shape)}")
    B, T, H, D = w.shape
    if temp.shape != (H,):
        raise ValueError(f"temp must be [H] = [{H}], got {list(temp.shape)}")
    if bias is not None and bias.shape not in ((H, T), (B, H, T)):
        raise ValueError(f"bias must be [H, T] = [{H}, {T}] or [B, H, T], got {list(bias.shape)}")
    local = LocalDocuments.of(cu_seqlens, B, T, shard.split if shard else None)
    documents = len(local.whole_lengths)
    state = initial_state
    if state is not None:
        check_state(state, documents, H, D)
    elif output_final_state:
        state = TssaState.empty(documents, H, D, like=w)
    with torch.autocast(w.device.type, enabled=False):
        dtype = statistics_dtype(w)
        bias_BHT = None if bias is None else bias.to(dtype).expand(B, H, T)
        initial = [] if state is None else [x.to(torch.promote_types(x.dtype, dtype)) for x in state]
        phases = import_module(choose(BACKENDS, w, name=backend))
        alone = shard is None and heads is None and hasattr(phases, "all_phases")
        scan = None if alone else partial(carries, shard, local)
        w_MHD = w.reshape(B * T, H, D).contiguous()
        layout = document_layout(local.offsets, phases.chunk_tokens(H, D, w.device), w.device)
        y_MHD, *final = CausalTssa.apply(phases, scan, layout, heads, w_MHD, temp.to(dtype), bias_BHT, *initial)  # pyright: ignore[reportGeneralTypeIssues]
    return y_MHD.view(B, T, H, D), TssaState(*final) if output_final_state else None


def tssa_step(
    w_t: Tensor,
    temp: Tensor,
    bias_t: Tensor | None,
    state: TssaState,
    *,
    heads: HeadSoftmax | None = None,
) -> tuple[Tensor, TssaState]:
    """One token after those of `state`: the result of `causal_tssa` for T = 1, differentiable.

    The returned state is float64 (float32 on mps, which has no float64): after some hundred thousand tokens, a new
    token is too small to change a float32 sum.

    Args:
        w_t: [B, H, D].
        temp: [H].
        bias_t: [H], [B, H] or None.
        state: statistics of the tokens before this one.
        heads: as in `causal_tssa`.

    Returns:
        y_t [B, H, D] in w_t's dtype, and the state that includes the token.

    Raises:
        ValueError: shapes that do not fit.
    """
    B, H, D = w_t.shape
    check_state(state, B, H, D)
    if temp.shape != (H,) or (bias_t is not None and bias_t.shape not in ((H,), (B, H))):
        bias_shape = None if bias_t is None else list(bias_t.shape)
        raise ValueError(f"temp must be [H] = [{H}] and bias_t [H] or [B, H], got {list(temp.shape)} and {bias_shape}")
    dtype = statistics_dtype(w_t)
    running = running_dtype(w_t.device)
    with torch.autocast(w_t.device.type, enabled=False):
        w_BHD = w_t.to(dtype)
        w_sq_BHD = w_BHD.square()
        energy_BHD = state.energy.to(running) + w_sq_BHD
        bias_BH = None if bias_t is None else bias_t.to(dtype)
        z_BH = token_scores(w_sq_BHD, energy_BHD.to(dtype), temp.to(dtype), bias_BH)
        pi_BH = z_BH.softmax(-1) if heads is None else SoftmaxOverHeads.apply(heads, z_BH)
        weighted_BHD = state.weighted_energy.to(running) + pi_BH[..., None] * w_sq_BHD
        mass_BH = state.mass.to(running) + pi_BH
        second_moment_BHD = weighted_BHD.to(dtype) / (mass_BH.to(dtype) + MASS_FLOOR)[..., None]
        y_BHD = -(pi_BH[..., None] * w_BHD) / (1 + second_moment_BHD)
    return y_BHD.to(w_t.dtype), TssaState(energy_BHD, weighted_BHD, mass_BH)
