"""TSSA with parts of other layers, one after the other: a decay, a convolution, a gate with a norm of each head.

    tost train demo 'model.plugins=["experiments/comparison/tssa_parts.py"]' model.pattern=P \\
      model.plugin_settings.P.decay=true run.name=decayed

Without parts it is the T layer of the package with `denom_bias = "none"`; with all of them, the gated convolution of
convolution.py with TSSA between convolution and norm.

Shapes: B sequences, T tokens, C channels, H heads of D channels, E sums of a head, L tokens of a chunk, N documents, n
of them with tokens on this rank.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from tost_lm.config import Section
from tost_lm.errors import ConfigError
from tost_lm.mixers.delta.layer import conv_std
from tost_lm.mixers.delta.settings import CONV_TAPS
from tost_lm.mixers.layer import HeadSoftmax, TokenMixer
from tost_lm.mixers.plugins import register
from tost_lm.mixers.shape import MixerShape
from tost_lm.mixers.spec import RecurrentSpec
from tost_lm.mixers.tssa.statistics import ENERGY_FLOOR
from tost_lm.ops.exchange import Decay, exchange
from tost_lm.ops.initialization import InitialValue, Normal, set_own_constants
from tost_lm.ops.layout import LocalDocuments
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.precision import MASS_FLOOR, running_dtype, statistics_dtype
from tost_lm.ops.short_conv import CONVOLUTION

CHUNK_TOKENS = 64
HALF_LIVES = 4.0, 512.0
"""Tokens in which the sums of the first and the last head halve, at first."""
NORM_EPSILON = 1e-5


class PartsSettings(Section):
    """`model.plugin_settings.P`."""

    decay: bool = False
    """All sums decay, in each head at its own learned rate."""
    convolution: bool = False
    """The tokens pass through a convolution of 4 taps and SiLU first."""
    gate: bool = False
    """The output has a norm of each head and a gate."""


class PartsSpec(RecurrentSpec):
    letter, name, tag, settings = "P", "TSSA with parts", "tssa-with-parts", PartsSettings

    def description(self, shape: MixerShape) -> str:
        return "TSSA with parts of other layers, linear in time"


class PartsState(NamedTuple):
    """The state after some tokens; zeros before the first one."""

    energy: Tensor
    """Σ w², [N, H, D], in the dtype of running sums."""
    weighted: Tensor
    """Σ Π·w² and Σ Π side by side, [N, H, D + 1], in the dtype of running sums."""
    taps: Tensor
    """The last tokens before the convolution, [N, taps − 1, C]; without one [N, 0, C]."""

    def to_running_dtype(self) -> "PartsState":
        return self


class TssaWithParts(TokenMixer):
    State, FIXED_STATE = PartsState, True
    OF_HEADS = ("temp", "log_rate", "conv")

    def __init__(self, shape: MixerShape):
        super().__init__()
        self.heads, own = shape.heads, shape.own
        self.in_proj = nn.Linear(shape.width, (1 + own.gate) * shape.width, bias=shape.bias)
        self.out_proj = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.temp = nn.Parameter(torch.empty(shape.heads))
        self.log_rate = nn.Parameter(torch.empty(shape.heads)) if own.decay else None
        taps = torch.empty(shape.width, CONV_TAPS)
        self.conv = nn.Parameter(taps.uniform_(-(CONV_TAPS**-0.5), CONV_TAPS**-0.5)) if own.convolution else None
        self.norm = nn.Parameter(torch.empty(shape.width // shape.heads)) if own.gate else None
        set_own_constants(self)

    def initial_values(self) -> dict[str, InitialValue]:
        shortest, longest = map(math.log, HALF_LIVES)
        half_lives = torch.linspace(shortest, longest, self.heads, device="cpu").exp()
        values = {"temp": 1.0, "log_rate": (math.log(2) / half_lives).log(), "conv": Normal(conv_std()), "norm": 1.0}
        return {name: value for name, value in values.items() if getattr(self, name) is not None}

    def split_heads(self, ranks: int, softmax: HeadSoftmax) -> None:
        raise ConfigError("model.pattern P: memberships are shares of all heads; set parallel.tensor=1")

    def forward(self, x_BTC: Tensor, state: PartsState | None, info: SequenceInfo) -> tuple[Tensor, PartsState | None]:
        heads_BTHE = self.in_proj(x_BTC).unflatten(-1, (self.heads, -1))
        w_BTHD, gate_BTHD = heads_BTHE.chunk(2, -1) if self.norm is not None else (heads_BTHE, None)
        taps = []
        if self.conv is not None:
            tensors = [w_BTHD.flatten(-2), self.conv, state.taps if state else None, info.state_offsets]
            w_BTC, *taps = CONVOLUTION(info, info.handle, tensors, info.wanted_state)
            w_BTHD = silu(w_BTC).unflatten(-1, (self.heads, -1))
        with torch.autocast(x_BTC.device.type, enabled=False):
            y_BTHD, energy_NHD, weighted_NHE = self.mix(w_BTHD, state, info)
        if gate_BTHD is not None:
            assert self.norm is not None
            y_BTHD = rms_norm(y_BTHD, y_BTHD.shape[-1:], eps=NORM_EPSILON) * self.norm * silu(gate_BTHD)
        if not info.output_state:
            return self.out_proj(y_BTHD.flatten(-2)), None
        energy_NHD, weighted_NHE = map(info.select_rows, (energy_NHD, weighted_NHE))
        last_NKC = taps[0] if taps else x_BTC.new_zeros(len(energy_NHD), 0, w_BTHD[0, 0].numel())
        return self.out_proj(y_BTHD.flatten(-2)), PartsState(energy_NHD, weighted_NHE, last_NKC)

    def mix(self, w_BTHD: Tensor, state: PartsState | None, info: SequenceInfo) -> tuple[Tensor, Tensor, Tensor]:
        """TSSA with the published memberships, and both sums after each document."""
        dtype = statistics_dtype(w_BTHD)
        log_decay_H = -self.log_rate.to(dtype).exp() if self.log_rate is not None else self.temp.new_zeros(self.heads)
        squares = w_BTHD.to(dtype).square()
        energy_BTHD, energy_NHD = decayed_sums(squares, log_decay_H.to(dtype), state and state.energy, info)
        shares_BTHD = squares / energy_BTHD.clamp_min(ENERGY_FLOOR)
        pi_BTH1 = (self.temp.to(dtype) * shares_BTHD.sum(-1)).softmax(-1)[..., None]
        weighted = torch.cat([pi_BTH1 * squares, pi_BTH1], -1)
        sums_BTHE, sums_NHE = decayed_sums(weighted, log_decay_H.to(dtype), state and state.weighted, info)
        moment_BTHD = sums_BTHE[..., :-1] / (sums_BTHE[..., -1:] + MASS_FLOOR)
        return (-pi_BTH1 * w_BTHD.to(dtype) / (1 + moment_BTHD)).to(w_BTHD.dtype), energy_NHD, sums_NHE


def decayed_sums(
    x_BTHE: Tensor, log_decay_H: Tensor, initial_NHE: Tensor | None, info: SequenceInfo
) -> tuple[Tensor, Tensor]:
    """s_t = ρ·s_{t−1} + x_t of all documents, [B, T, H, E], and after each, [N, H, E]; ranks exchange theirs."""
    local, running = info.local, running_dtype(x_BTHE.device)
    per_document = initial_NHE is not None or bool(info.output_state)
    empty_NHE = x_BTHE.new_zeros(len(local.whole_lengths), *x_BTHE.shape[2:], dtype=running)
    initial_NHE = info.pad_rows(initial_NHE)
    initial_NHE = empty_NHE if initial_NHE is None else initial_NHE.to(running)
    before_nHE = initial_NHE[local.documents]
    if info.shard is None:
        return in_documents(x_BTHE, log_decay_H, before_nHE, local)
    _, added_nHE = in_documents(x_BTHE, log_decay_H, torch.zeros_like(before_nHE), local)
    decay_C = log_decay_H.to(running).repeat_interleave(added_nHE.shape[-1])
    states = initial_NHE.flatten(1), added_nHE.flatten(1), decay_C
    before, final = exchange(info.shard, local, Decay, *states, per_document=per_document)
    sums_BTHE, _ = in_documents(x_BTHE, log_decay_H, before.view_as(before_nHE), local)
    return sums_BTHE, initial_NHE if final is None else final.view_as(initial_NHE)


def in_documents(
    x_BTHE: Tensor, log_decay_H: Tensor, before_nHE: Tensor, local: LocalDocuments
) -> tuple[Tensor, Tensor]:
    if not local.packed:
        return in_rows(x_BTHE, log_decay_H, before_nHE)
    cuts = enumerate(pairwise(local.offsets))
    found = [in_rows(x_BTHE[:, a:b], log_decay_H, before_nHE[n : n + 1]) for n, (a, b) in cuts]
    sums_1THE, final_nHE = zip(*found, strict=True)
    return torch.cat(sums_1THE, 1), torch.cat(final_nHE)


def in_rows(x_BTHE: Tensor, log_decay_H: Tensor, sums_BHE: Tensor) -> tuple[Tensor, Tensor]:
    """The sums after each token, and after the last, chunk by chunk."""
    token_L = torch.arange(min(CHUNK_TOKENS, x_BTHE.shape[1]), device=x_BTHE.device)
    age_LL = token_L[:, None] - token_L
    gaps_HLL = (log_decay_H[:, None, None] * age_LL).masked_fill(age_LL < 0, -torch.inf).exp()
    since_LH1 = (log_decay_H * (token_L[:, None] + 1)).exp()[..., None]
    outputs, log_running_H1 = [], log_decay_H.to(sums_BHE.dtype)[:, None]
    for x_BLHE in x_BTHE.split(CHUNK_TOKENS, 1):
        L = x_BLHE.shape[1]
        added = torch.einsum("hij,bjhe->bihe", gaps_HLL[:, :L, :L], x_BLHE)
        outputs.append(added + since_LH1[:L] * sums_BHE[:, None].to(x_BTHE.dtype))
        sums_BHE = (L * log_running_H1).exp() * sums_BHE + added[:, -1].to(sums_BHE.dtype)
    return torch.cat(outputs, 1), sums_BHE


register(PartsSpec(), TssaWithParts)
