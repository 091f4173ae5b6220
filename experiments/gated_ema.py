"""A gated exponential moving average, a token mixer with constant decays: the plugin of docs/tutorials/own_mixer.md.

In each channel, with the sigmoid σ and a learned ρ:

    h_t = ρ · h_{t−1} + (1 − ρ) · σ(g_t) · v_t        y_t = silu(o_t) · h_t

Shapes: B sequences, T tokens, M = B·T, C channels, E projected channels, N documents, n of them with tokens on this
rank.
"""

import math
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from tost_lm.config import Section
from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.plugins import register
from tost_lm.mixers.spec import RecurrentSpec
from tost_lm.ops.affine import affine_scan, initial_states
from tost_lm.ops.initialization import set_own_constants
from tost_lm.ops.layout import int64_tensor
from tost_lm.ops.precision import statistics_dtype


class EmaSettings(Section):
    longest: float = Field(default=512.0, ge=4)
    """Half-life of the slowest channel of a head in tokens; that of the fastest is 4."""


class EmaSpec(RecurrentSpec):
    letter, name, tag, settings = "E", "gated EMA", "gated-ema", EmaSettings

    def description(self, shape):
        return "gated exponential moving average, linear in time"


class EmaState(NamedTuple):
    mean: Tensor
    """h after some tokens, [N, C]; zeros before the first one."""


class GatedEma(TokenMixer):
    State, OF_HEADS = EmaState, ("log_rate",)
    FIXED_STATE = True  # in decoding, h keeps its shape, and forward reads no values: a CUDA graph

    def __init__(self, shape):
        super().__init__()
        self.heads, self.longest = shape.heads, shape.own.longest
        self.in_proj = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.out_proj = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.log_rate = nn.Parameter(torch.empty(shape.width))
        set_own_constants(self)

    def initial_values(self):  # log(ln 2 / half-life); every head has the same ladder of half-lives
        ladder = torch.linspace(0, 1, len(self.log_rate) // self.heads, device="cpu")
        return {"log_rate": (math.log(2) / (4 * (self.longest / 4) ** ladder)).log().repeat(self.heads)}

    def forward(self, x_BTC, state, info):
        projected_BTE = self.in_proj(x_BTC)  # all tokens of the call; on tensor ranks, x has a part of them
        # M = B · T tokens. The channels of a head are next to each other, so tensor ranks can split the heads.
        heads_MHE = projected_BTE.flatten(0, 1).unflatten(-1, (self.heads, -1))
        value_MC, gate_MC, out_MC = (x.flatten(1) for x in heads_MHE.chunk(3, -1))
        with torch.autocast(x_BTC.device.type, enabled=False):
            dtype = statistics_dtype(x_BTC)
            log_decay_C = -self.log_rate.to(dtype).exp()
            h_MC = -log_decay_C.expm1() * gate_MC.to(dtype).sigmoid() * value_MC.to(dtype)
            h_MC, mean_NC = average(h_MC, log_decay_C, state and info.pad_rows(state.mean), info)
            y_MC = silu(out_MC) * h_MC.to(out_MC.dtype)
        state = EmaState(info.select_rows(mean_NC)) if info.output_state and mean_NC is not None else None
        return self.out_proj(y_MC.unflatten(0, projected_BTE.shape[:2])), state


def average(h_MC, log_decay_C, initial_NC, info):
    """h of each token, [M, C], and after each document, [N, C]; n documents have tokens on this rank."""
    local, device, channels = info.local, h_MC.device, len(log_decay_C)
    lengths_n, starts_n = int64_tensor(local.lengths, device), int64_tensor(local.offsets[:-1], device)
    token_M = torch.arange(len(h_MC), device=device)
    age_M1 = (token_M - starts_n.repeat_interleave(lengths_n, output_size=len(h_MC)))[:, None]
    distance = 1
    while distance < max(local.lengths):  # h contains `distance` tokens so far; add those before them
        earlier_MC = pad(h_MC[:-distance], (0, 0, distance, 0))
        h_MC = h_MC + torch.where(age_M1 >= distance, (distance * log_decay_C).exp() * earlier_MC, 0)
        distance *= 2
    factor_nC, added_nC = (lengths_n[:, None] * log_decay_C).exp(), h_MC[starts_n + lengths_n - 1]

    def scan(before_nC1):  # h, and after the documents, from that before them
        before_nC = before_nC1[..., 0].to(h_MC.dtype)
        before_MC = before_nC.repeat_interleave(lengths_n, 0, output_size=len(h_MC))
        return h_MC + ((age_M1 + 1) * log_decay_C).exp() * before_MC, (factor_nC * before_nC + added_nC)[..., None]

    def maps(_, lengths):  # A, a diagonal, and C, the h that the tokens lead to from 0, of the last documents
        return factor_nC[-len(lengths) :, :, None], added_nC[-len(lengths) :, :, None]

    before_NC1 = None if initial_NC is None else initial_NC[..., None]
    initial_NC1 = initial_states(before_NC1, [len(local.whole_lengths), channels, 1], like=h_MC)
    wanted = {"local": local, "shard": info.shard, "output_final_state": bool(info.output_state)}
    h_MC, final_NC1 = affine_scan(scan, maps, initial_NC1, **wanted)
    return h_MC, None if final_NC1 is None else final_NC1[..., 0]


register(EmaSpec(), GatedEma)
