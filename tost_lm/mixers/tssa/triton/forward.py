"""The forward phases: (a) energy, (b) memberships, (c) output. Each kernel is below its phase."""
# ruff: noqa: RUF005  (Triton has no starred expressions)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tost_lm.mixers.tssa.phases import Inputs, Stored, Sums
from tost_lm.mixers.tssa.triton.common import (
    MASS_FLOOR,
    RUN_TIME,
    STEP,
    heads_of_group,
    in_stages,
    inverse_energies,
    launch,
    load_bias,
    load_sums,
    load_token,
    places_of_heads,
    places_of_step,
    reciprocal,
    scoring_arguments,
    stack,
    store_token,
    sums,
    tokens_of_program,
)


def energy(inputs: Inputs) -> Sums:
    """(a) Σ w²."""
    energy_KHD = new_sums(inputs)
    launch(energy_kernel, inputs, energy_KHD, channels=4)
    return sums(energy_KHD, inputs.layout)


@triton.jit
def energy_kernel(
    w_MHD, start_K, end_K, energy_KHD,
    H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    k, g, start, tokens, limit = tokens_of_program(start_K, end_K, tl.cdiv(H, G_), FULL)
    _, _, d_GD, real_GD = heads_of_group(g, H, D, G_, D_)
    w_MHD += start * H * D
    energy_GD = tl.zeros((G_, D_), tl.float32)
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            w_GD = load_token(w_MHD + d_GD, i, j, limit, real_GD, H * D)
            energy_GD += w_GD * w_GD
    tl.store(energy_KHD + k * (H * D) + d_GD, energy_GD, mask=real_GD)


def memberships(inputs: Inputs, energy_KHD: Tensor) -> tuple[Tensor, Sums, Sums]:
    """(b) Π, Σ Π·w² and Σ Π. With a separate softmax, w is read before and after it."""
    weighted_KHD, softmax = new_sums(inputs), inputs.softmax
    mass_KH = torch.empty_like(weighted_KHD[..., 0])

    def run(stage: str, pi_MH: Tensor) -> None:
        launch(
            memberships_kernel, inputs, energy_KHD, pi_MH, weighted_KHD, mass_KH,
            **scoring_arguments(inputs), STAGE=stage, channels=4,
        )  # fmt: skip

    pi_MH = in_stages(run, ("scores", "softmax", "moments"), inputs, softmax and softmax.forward)
    return pi_MH, sums(weighted_KHD, inputs.layout), sums(mass_KH, inputs.layout)


@triton.jit(do_not_specialize=RUN_TIME)
def memberships_kernel(
    w_MHD, start_K, end_K, energy_KHD, pi_MH, weighted_KHD, mass_KH,
    temp_H, bias_BHT, stride_b, stride_h, stride_t, T, STAGE: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, H_: tl.constexpr, FULL: tl.constexpr,
    GROUPS: tl.constexpr = 1,
):  # fmt: skip
    """`GROUPS` groups of heads of a chunk. `pi_MH` first holds z, then Π: stage "scores" ends before the softmax,
    "moments" starts after it, "softmax" has all heads and computes it alone, "all" computes all three."""
    k, part, start, tokens, limit = tokens_of_program(start_K, end_K, tl.cdiv(H, G_) // GROUPS, FULL)
    w_MHD += start * H * D
    if STAGE == "scores" or STAGE == "all":
        for g in range(part * GROUPS, (part + 1) * GROUPS):
            h_G, real_G, d_GD, real_GD = heads_of_group(g, H, D, G_, D_)
            energy_GD = load_sums(energy_KHD + k * (H * D) + d_GD, real_GD)
            temp_G = load_sums(temp_H + h_G, real_G)
            for i in range(0, tokens, STEP):
                shares = ()
                for j in tl.static_range(STEP):
                    w_GD = load_token(w_MHD + d_GD, i, j, limit, real_GD, H * D)
                    w_sq_GD = w_GD * w_GD
                    energy_GD += w_sq_GD
                    shares = shares + (tl.sum(w_sq_GD * inverse_energies(energy_GD), axis=1),)
                score_GJ = stack(shares)
                if bias_BHT is not None:
                    score_GJ += load_bias(i, limit, start, h_G, real_G, bias_BHT, T, stride_b, stride_h, stride_t, D)
                places_GJ, real_GJ = places_of_step(i, limit, h_G, real_G, H)
                tl.store(pi_MH + start * H + places_GJ, temp_G[:, None] * score_GJ, mask=real_GJ)
    if STAGE == "softmax" or STAGE == "all":
        # Barriers: all of z is stored before a thread loads it, and loaded before a thread stores Π over it.
        tl.debug_barrier()
        places_TH, token_T1, head_1H = places_of_heads(start, limit, H, H_)
        z_TH = tl.load(pi_MH + places_TH, mask=token_T1 & head_1H, other=0.0)
        tl.debug_barrier()
        z_TH = tl.where(head_1H, z_TH, float("-inf"))
        pi_TH = tl.exp(z_TH - tl.max(z_TH, axis=1)[:, None])
        tl.store(pi_MH + places_TH, pi_TH / tl.sum(pi_TH, axis=1)[:, None], mask=token_T1 & head_1H)
        tl.debug_barrier()
    if STAGE == "moments" or STAGE == "all":
        for g in range(part * GROUPS, (part + 1) * GROUPS):
            h_G, real_G, d_GD, real_GD = heads_of_group(g, H, D, G_, D_)
            weighted_GD, mass_G = tl.zeros((G_, D_), tl.float32), tl.zeros((G_,), tl.float32)
            for i in range(0, tokens, STEP):
                for j in tl.static_range(STEP):
                    w_GD = load_token(w_MHD + d_GD, i, j, limit, real_GD, H * D)
                    pi_G = load_token(pi_MH + start * H + h_G, i, j, limit, real_G, H)
                    weighted_GD += pi_G[:, None] * (w_GD * w_GD)
                    mass_G += pi_G
            tl.store(weighted_KHD + k * (H * D) + d_GD, weighted_GD, mask=real_GD)
            tl.store(mass_KH + k * H + h_G, mass_G, mask=real_G)


def output(inputs: Inputs, stored: Stored) -> Tensor:
    """(c) y."""
    y_MHD = torch.empty_like(inputs.w_MHD, memory_format=torch.contiguous_format)
    launch(output_kernel, inputs, stored.pi_MH, stored.weighted_KHD, stored.mass_KH, y_MHD, channels=4)
    return y_MHD


@triton.jit
def output_kernel(
    w_MHD, start_K, end_K, pi_MH, weighted_KHD, mass_KH, y_MHD,
    H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """y = −w·Π·N′/(N′ + S2), where N′ + S2 is one sum, of Π·(1 + w²)."""
    k, g, start, tokens, limit = tokens_of_program(start_K, end_K, tl.cdiv(H, G_), FULL)
    h_G, real_G, d_GD, real_GD = heads_of_group(g, H, D, G_, D_)
    w_MHD += start * H * D
    y_MHD += start * H * D
    mass_G = load_sums(mass_KH + k * H + h_G, real_G) + MASS_FLOOR
    both_GD = load_sums(weighted_KHD + k * (H * D) + d_GD, real_GD) + mass_G[:, None]
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            w_GD = load_token(w_MHD + d_GD, i, j, limit, real_GD, H * D)
            pi_G = load_token(pi_MH + start * H + h_G, i, j, limit, real_G, H)
            mass_G += pi_G
            both_GD += pi_G[:, None] * (1 + w_GD * w_GD)
            y_GD = w_GD * ((-pi_G * mass_G)[:, None] * reciprocal(both_GD))
            store_token(y_MHD + d_GD, y_GD, i, j, limit, real_GD, H * D)


def new_sums(inputs: Inputs) -> Tensor:
    return torch.empty(len(inputs.layout.start_K), *inputs.w_MHD.shape[1:], device=inputs.w_MHD.device)
