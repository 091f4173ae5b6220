"""The backward phases: (c′) output, (b′) memberships, (a′) energy. Each kernel is below its phase.

(b′) and (a′) need the sums up to each token and from each token on. They go through the steps of a chunk from its end,
forward in each to compute the first, then backward for the second. What the second needs stays in registers.
"""
# ruff: noqa: RUF005  (Triton has no starred expressions)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tost_lm.mixers.tssa.phases import Inputs, Stored, Sums
from tost_lm.mixers.tssa.triton.common import (
    ENERGY_FLOOR,
    MASS_FLOOR,
    RUN_TIME,
    STEP,
    TOKENS,
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
    sum_of_thread,
    sums,
    tokens_of_program,
)
from tost_lm.mixers.tssa.triton.forward import new_sums

CHANNELS = tl.constexpr(2)
"""Channels of a thread in (b′) and (a′). With four their registers would not suffice."""


def output_backward(dy_MHD: Tensor, inputs: Inputs, stored: Stored) -> tuple[Sums, Sums]:
    """(c′) The gradients of S2 and N."""
    d_weighted_KHD = new_sums(inputs)
    d_mass_KH = torch.empty_like(d_weighted_KHD[..., 0])
    before = stored.pi_MH, stored.weighted_KHD, stored.mass_KH
    launch(output_backward_kernel, inputs, dy_MHD, *before, d_weighted_KHD, d_mass_KH, channels=4)
    return sums(d_weighted_KHD, inputs.layout, reverse=True), sums(d_mass_KH, inputs.layout, reverse=True)


@triton.jit
def output_backward_kernel(
    w_MHD, start_K, end_K, dy_MHD, pi_MH, weighted_KHD, mass_KH, d_weighted_KHD, d_mass_KH,
    H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    k, g, start, tokens, limit = tokens_of_program(start_K, end_K, tl.cdiv(H, G_), FULL)
    h_G, real_G, d_GD, real_GD = heads_of_group(g, H, D, G_, D_)
    w_MHD += start * H * D
    dy_MHD += start * H * D
    weighted_GD = load_sums(weighted_KHD + k * (H * D) + d_GD, real_GD)
    mass_G = load_sums(mass_KH + k * H + h_G, real_G) + MASS_FLOOR
    d_weighted_GD, d_mass_GD = tl.zeros((G_, D_), tl.float32), tl.zeros((G_, D_), tl.float32)
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            w_GD = load_token(w_MHD + d_GD, i, j, limit, real_GD, H * D)
            dy_GD = load_token(dy_MHD + d_GD, i, j, limit, real_GD, H * D)
            pi_G = load_token(pi_MH + start * H + h_G, i, j, limit, real_G, H)
            weighted_GD, mass_G, _dy_inverse_GD, term_GD = output_gradients(w_GD, dy_GD, pi_G, weighted_GD, mass_G)
            d_weighted_GD += term_GD * mass_G[:, None]
            d_mass_GD -= term_GD * weighted_GD
    tl.store(d_weighted_KHD + k * (H * D) + d_GD, d_weighted_GD, mask=real_GD)
    tl.store(d_mass_KH + k * H + h_G, tl.sum(d_mass_GD, axis=1), mask=real_G)


@triton.jit
def output_gradients(w_GD, dy_GD, pi_G, weighted_GD, mass_G):
    """S2 and N′ with the token itself, then dy/(N′ + S2), and the term of dS2/N′ and −dN/S2: dy·w·Π/(N′ + S2)²."""
    weight_GD = w_GD * pi_G[:, None]
    weighted_GD += weight_GD * w_GD
    mass_G += pi_G
    inverse_GD = reciprocal(mass_G[:, None] + weighted_GD)
    dy_inverse_GD = dy_GD * inverse_GD
    return weighted_GD, mass_G, dy_inverse_GD, dy_inverse_GD * (weight_GD * inverse_GD)


def memberships_backward(
    dy_MHD: Tensor, inputs: Inputs, stored: Stored, d_weighted_KHD: Tensor, d_mass_KH: Tensor
) -> tuple[Tensor, Tensor, Sums]:
    """(b′) The gradients of z, of temp and of S1. With a separate softmax, w is read before and after it."""
    d_energy_KHD, softmax = new_sums(inputs), inputs.softmax
    d_temp_KH = torch.empty_like(d_energy_KHD[..., 0])

    def run(stage: str, d_z_MH: Tensor) -> None:
        launch(
            memberships_backward_kernel, inputs,
            dy_MHD, *stored, d_weighted_KHD, d_mass_KH,
            d_z_MH, d_temp_KH, d_energy_KHD,
            **scoring_arguments(inputs), STAGE=stage, channels=CHANNELS.value,
        )  # fmt: skip

    given = softmax and partial(softmax.backward, stored.pi_MH)
    d_z_MH = in_stages(run, ("memberships", "softmax", "scores"), inputs, given)
    return d_z_MH, d_temp_KH.sum(0), sums(d_energy_KHD, inputs.layout, reverse=True)


@triton.jit(do_not_specialize=RUN_TIME)
def memberships_backward_kernel(
    w_MHD, start_K, end_K, dy_MHD, pi_MH, energy_KHD, weighted_KHD, mass_KH, d_weighted_KHD, d_mass_KH,
    d_z_MH, d_temp_KH, d_energy_KHD,
    temp_H, bias_BHT, stride_b, stride_h, stride_t, T, STAGE: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, H_: tl.constexpr, FULL: tl.constexpr,
    GROUPS: tl.constexpr = 1,
):  # fmt: skip
    """`GROUPS` groups of heads of a chunk. `d_z_MH` first holds the gradient of Π, then that of z: stage "memberships"
    ends before the softmax, "scores" starts after it, "softmax" has all heads and computes it alone, "all" computes all
    three."""
    k, part, start, tokens, limit = tokens_of_program(start_K, end_K, tl.cdiv(H, G_) // GROUPS, FULL)
    w_THD, dy_THD = w_MHD + start * H * D, dy_MHD + start * H * D
    pi_TH, d_z_TH = pi_MH + start * H, d_z_MH + start * H
    if STAGE == "memberships" or STAGE == "all":
        for g in range(part * GROUPS, (part + 1) * GROUPS):
            h_G, real_G, d_GD, real_GD = heads_of_group(g, H, D, G_, D_)
            w_TGD, dy_TGD, pi_TG = w_THD + d_GD, dy_THD + d_GD, pi_TH + h_G
            weighted_GD = load_sums(weighted_KHD + k * (H * D) + d_GD, real_GD)
            mass_G = load_sums(mass_KH + k * H + h_G, real_G) + MASS_FLOOR
            before_steps = ((weighted_GD, mass_G),)
            for i in tl.static_range(0, TOKENS - STEP, STEP):
                for j in tl.static_range(STEP):
                    w_GD = load_token(w_TGD, i, j, limit, real_GD, H * D)
                    pi_G = load_token(pi_TG, i, j, limit, real_G, H)
                    weighted_GD += w_GD * pi_G[:, None] * w_GD
                    mass_G += pi_G
                before_steps = before_steps + ((weighted_GD, mass_G),)

            d_weighted_GD = load_sums(d_weighted_KHD + k * (H * D) + d_GD, real_GD)
            d_mass_G = load_sums(d_mass_KH + k * H + h_G, real_G)
            d_mass_GL = tl.zeros((G_, D_ // CHANNELS), tl.float32)
            steps = tl.cdiv(tokens, STEP)
            for steps_after in range(0, steps):
                step = steps - 1 - steps_after
                weighted_GD, mass_G = of_step(before_steps, step)
                terms = ()
                for j in tl.static_range(STEP):
                    w_GD = load_token(w_TGD, step * STEP, j, limit, real_GD, H * D)
                    dy_GD = load_token(dy_TGD, step * STEP, j, limit, real_GD, H * D)
                    pi_G = load_token(pi_TG, step * STEP, j, limit, real_G, H)
                    weighted_GD, mass_G, dy_inverse_GD, term_GD = output_gradients(
                        w_GD, dy_GD, pi_G, weighted_GD, mass_G
                    )
                    d_mass_term_GL = sum_of_thread(term_GD * weighted_GD, CHANNELS)
                    dy_a_w_GL = sum_of_thread(dy_inverse_GD * w_GD, CHANNELS) * mass_G[:, None]
                    terms = terms + ((term_GD * mass_G[:, None], d_mass_term_GL, dy_a_w_GL),)
                d_pi = ()
                for j in tl.static_range(STEP - 1, -1, -1):
                    d_weighted_term_GD, d_mass_term_GL, dy_a_w_GL = terms[j]
                    w_GD = load_token(w_TGD, step * STEP, j, limit, real_GD, H * D)
                    d_weighted_GD += d_weighted_term_GD
                    d_mass_GL -= d_mass_term_GL
                    d_pi_GL = sum_of_thread(d_weighted_GD * (w_GD * w_GD), CHANNELS) - dy_a_w_GL + d_mass_GL
                    d_pi = (tl.sum(d_pi_GL, axis=1),) + d_pi
                places_GJ, real_GJ = places_of_step(step * STEP, limit, h_G, real_G, H)
                tl.store(d_z_TH + places_GJ, d_mass_G[:, None] + stack(d_pi), mask=real_GJ)
    if STAGE == "softmax" or STAGE == "all":
        # Barriers: all of dΠ is stored before a thread loads it, and loaded before a thread stores dz over it.
        tl.debug_barrier()
        places_TH, token_T1, head_1H = places_of_heads(start, limit, H, H_)
        real_TH = token_T1 & head_1H
        pi_TH = tl.load(pi_MH + places_TH, mask=real_TH, other=0.0)
        d_pi_TH = tl.load(d_z_MH + places_TH, mask=real_TH, other=0.0)
        tl.debug_barrier()
        # Minus dΠ of the largest Π: see HeadSoftmax.backward.
        largest_TH = pi_TH == tl.max(pi_TH, axis=1)[:, None]
        d_pi_TH -= tl.max(tl.where(largest_TH, d_pi_TH, float("-inf")), axis=1)[:, None]
        d_pi_TH -= tl.sum(pi_TH * d_pi_TH, axis=1)[:, None]
        tl.store(d_z_MH + places_TH, pi_TH * d_pi_TH, mask=real_TH)
        tl.debug_barrier()
    if STAGE == "scores" or STAGE == "all":
        for g in range(part * GROUPS, (part + 1) * GROUPS):
            h_G, real_G, d_GD, real_GD = heads_of_group(g, H, D, G_, D_)
            w_TGD, d_z_TG = w_THD + d_GD, d_z_TH + h_G
            energy_GD = load_sums(energy_KHD + k * (H * D) + d_GD, real_GD)
            d_temp_GD, d_energy_GD = tl.zeros((G_, D_), tl.float32), tl.zeros((G_, D_), tl.float32)
            d_temp_GJ = tl.zeros((G_, STEP), tl.float32)
            for i in range(0, tokens, STEP):
                for j in tl.static_range(STEP):
                    w_GD = load_token(w_TGD, i, j, limit, real_GD, H * D)
                    d_z_G = load_token(d_z_TG, i, j, limit, real_G, H)
                    w_sq_GD = w_GD * w_GD
                    energy_GD += w_sq_GD
                    inverse_GD = inverse_energies(energy_GD)
                    d_shares_GD = d_z_G[:, None] * (w_sq_GD * inverse_GD)
                    d_temp_GD += d_shares_GD
                    d_energy_GD += d_shares_GD * tl.where(energy_GD < ENERGY_FLOOR, 0.0, inverse_GD)
                if bias_BHT is not None:
                    places_GJ, real_GJ = places_of_step(i, limit, h_G, real_G, H)
                    d_temp_GJ += load_sums(d_z_TH + places_GJ, real_GJ) * load_bias(
                        i, limit, start, h_G, real_G, bias_BHT, T, stride_b, stride_h, stride_t, D
                    )
            tl.store(d_temp_KH + k * H + h_G, tl.sum(d_temp_GD, axis=1) + tl.sum(d_temp_GJ, axis=1), mask=real_G)
            d_energy_GD *= -load_sums(temp_H + h_G, real_G)[:, None]
            tl.store(d_energy_KHD + k * (H * D) + d_GD, d_energy_GD, mask=real_GD)


@triton.jit
def of_step(values, step):
    """`values[step]`, a pair or more of tensors."""
    chosen = values[0]
    for s in tl.static_range(1, len(values)):
        parts = ()
        for n in tl.static_range(len(chosen)):
            parts = parts + (tl.where(step == s, values[s][n], chosen[n]),)
        chosen = parts
    return chosen


def energy_backward(
    dy_MHD: Tensor, inputs: Inputs, stored: Stored, d_z_MH: Tensor, d_energy_KHD: Tensor, d_weighted_KHD: Tensor
) -> Tensor:
    """(a′) dw."""
    dw_MHD = torch.empty_like(inputs.w_MHD, memory_format=torch.contiguous_format)
    launch(
        energy_backward_kernel, inputs, dy_MHD, *stored, d_z_MH, d_energy_KHD, d_weighted_KHD, dw_MHD,
        inputs.temp_H, channels=CHANNELS.value,
    )  # fmt: skip
    return dw_MHD


@triton.jit
def energy_backward_kernel(
    w_MHD, start_K, end_K, dy_MHD, pi_MH, energy_KHD, weighted_KHD, mass_KH, d_z_MH, d_energy_KHD, d_weighted_KHD,
    dw_MHD, temp_H, H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """A token's own term through S1 is combined with that of w²/S1: u·(S1 − w²)/S1², with S1 − w² = S1 before the
    token. R1 sums later tokens only. (u/S1 plus a sum with the own term −u·w²/S1² is equal, but cancels near a
    document's first tokens.) As dw is 2·w times the gradient of w², R1, R2 and u are doubled here."""
    k, g, start, tokens, limit = tokens_of_program(start_K, end_K, tl.cdiv(H, G_), FULL)
    J: tl.constexpr = STEP if FULL else STEP // 2  # masks need registers
    w_THD, dy_THD, dw_THD = w_MHD + start * H * D, dy_MHD + start * H * D, dw_MHD + start * H * D
    pi_TH, d_z_TH = pi_MH + start * H, d_z_MH + start * H
    h_G, real_G, d_GD, real_GD = heads_of_group(g, H, D, G_, D_)
    w_TGD, dy_TGD, dw_TGD, pi_TG, d_z_TG = w_THD + d_GD, dy_THD + d_GD, dw_THD + d_GD, pi_TH + h_G, d_z_TH + h_G
    energy_GD = load_sums(energy_KHD + k * (H * D) + d_GD, real_GD)
    weighted_GD = load_sums(weighted_KHD + k * (H * D) + d_GD, real_GD)
    mass_G = load_sums(mass_KH + k * H + h_G, real_G) + MASS_FLOOR
    before_steps = ((energy_GD, weighted_GD, mass_G),)
    for i in tl.static_range(0, TOKENS - J, J):
        for j in tl.static_range(J):
            w_GD = load_token(w_TGD, i, j, limit, real_GD, H * D)
            pi_G = load_token(pi_TG, i, j, limit, real_G, H)
            energy_GD += w_GD * w_GD
            weighted_GD += w_GD * pi_G[:, None] * w_GD
            mass_G += pi_G
        before_steps = before_steps + ((energy_GD, weighted_GD, mass_G),)

    temp_G = 2 * load_sums(temp_H + h_G, real_G)
    d_energy_GD = 2 * load_sums(d_energy_KHD + k * (H * D) + d_GD, real_GD)
    d_weighted_GD = 2 * load_sums(d_weighted_KHD + k * (H * D) + d_GD, real_GD)
    steps = tl.cdiv(tokens, J)
    for steps_after in range(0, steps):
        step = steps - 1 - steps_after
        energy_GD, weighted_GD, mass_G = of_step(before_steps, step)
        terms = ()
        for j in tl.static_range(J):
            w_GD = load_token(w_TGD, step * J, j, limit, real_GD, H * D)
            dy_GD = load_token(dy_TGD, step * J, j, limit, real_GD, H * D)
            pi_G = load_token(pi_TG, step * J, j, limit, real_G, H)
            d_z_G = load_token(d_z_TG, step * J, j, limit, real_G, H)
            weighted_GD, mass_G, dy_inverse_GD, term_GD = output_gradients(w_GD, dy_GD, pi_G, weighted_GD, mass_G)
            w_sq_GD = w_GD * w_GD
            earlier_GD = energy_GD
            energy_GD += w_sq_GD
            inverse_GD = inverse_energies(energy_GD)
            fixed_GD = energy_GD < ENERGY_FLOOR
            u_inverse_GD = (temp_G * d_z_G)[:, None] * inverse_GD
            d_energy_term_GD = u_inverse_GD * tl.where(fixed_GD, 0.0, w_sq_GD * inverse_GD)
            own_GD = u_inverse_GD * tl.where(fixed_GD, 1.0, earlier_GD * inverse_GD)
            dw_GD = w_GD * own_GD - dy_inverse_GD * (pi_G * mass_G)[:, None]
            terms = terms + ((term_GD * (2 * mass_G)[:, None], d_energy_term_GD, dw_GD),)
        for j in tl.static_range(J - 1, -1, -1):
            d_weighted_term_GD, d_energy_term_GD, dw_GD = terms[j]
            w_GD = load_token(w_TGD, step * J, j, limit, real_GD, H * D)
            pi_G = load_token(pi_TG, step * J, j, limit, real_G, H)
            d_weighted_GD += d_weighted_term_GD
            dw_GD += w_GD * (pi_G[:, None] * d_weighted_GD + d_energy_GD)
            d_energy_GD -= d_energy_term_GD
            store_token(dw_TGD, dw_GD, step * J, j, limit, real_GD, H * D)
