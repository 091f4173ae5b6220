"""Mixers of the compared forms, in plain PyTorch: token statistics with memory, and their rivals.

Shapes: B sequences, T tokens, C channels, H heads, D channels per head, G groups of slots, S slots per group, U value
channels per group. With decay, convolution, centring, gate, norm and slots switched off, `Statistics` is the published
operator. Nothing here keeps a state between calls; `Form.state_numbers` counts what decoding would keep.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, scaled_dot_product_attention, softplus

from benchmarks.forms.sums import decayed_read, decayed_sum, resetting
from tost_lm.config import Section
from tost_lm.model.positions import apply_rotary, rotary_cos_sin
from tost_lm.ops.naive import ENERGY_FLOOR, MASS_FLOOR

TAPS = 4
"""Tokens that a short convolution reads."""
CHUNK = 32
COPYING_TEMP = 4.0
HALF_LIFE, LAST_HALF_LIFE = 4, 512
"""First and last of the half-lives that heads begin with."""
Decay = Literal["none", "learned", "input"]


class Form(Section):
    """A mixer. `statistics` has two branches, statistics of the heads and a memory of slots; either may be absent."""

    mixer: Literal["statistics", "softmax", "linear"] = "statistics"
    heads: int = Field(default=4, gt=0)
    """Heads of the statistics, of softmax attention or of linear attention."""
    channels: int | None = Field(default=None, ge=0)
    """Channels of the statistics, all heads together; unset: those of the model; 0: no statistics."""
    share: bool = False
    """Scores as published, energy ÷ running sum (energy-share), instead of ÷ running mean (energy-mean)."""
    decay: Decay = "none"
    """Decay of the statistics or of linear attention: half-lives of each head, or (`input`) of each token."""
    conv: bool = False
    """A short causal convolution behind the input projection."""
    centred: bool = False
    """Subtract the mean of the head's members."""
    means: bool = False
    """Read the means of the heads' members too, in channels of their own."""
    gate: Literal["none", "channel"] = "none"
    """Sigmoid gate of the output."""
    norm: bool = False
    """RMS norm of each head of the output."""
    groups: int = Field(default=0, ge=0)
    """Groups of slots; 0: no slots."""
    slots: int = Field(default=0, ge=0)
    """Slots of a group, between which a token's memberships are distributed; of linear attention, channels of a key."""
    values: int = Field(default=0, ge=0)
    """Channels of a group's values, or of a head's values of linear attention."""
    slot_decay: Decay = "none"
    """Decay of the slots of each group."""
    slot_half_life: int = Field(default=HALF_LIFE, gt=0)
    """The shortest half-life that groups begin with."""
    copying: bool = False
    """Begin with a memory that copies: queries equal keys, and the output projection is the values' transpose."""
    skip: bool = False
    """A further membership of each group, in no slot: a token need not be written."""
    window: int = Field(default=0, ge=0)
    """Window of softmax attention in tokens; 0: none."""
    reset_every: int = Field(default=0, ge=0)
    """Sums start again after as many tokens; 0: never."""
    positions: bool = False
    """Learned positions of embedding and scores, as published."""

    def state_numbers(self, width: int) -> int | None:
        """Numbers that decoding keeps for a layer; None: they grow with the text."""
        if self.mixer == "softmax":
            taps = 3 * (TAPS - 1) * width if self.conv else 0
            return 2 * self.window * width + taps if self.window else None
        channels = width if self.channels is None else self.channels
        keys, values = self.groups * self.slots, self.groups * self.values
        if self.mixer == "linear":
            keys, values = self.heads * self.slots, self.heads * self.values
            return keys * self.values + (TAPS - 1) * (2 * keys + values) * self.conv
        numbers = channels * (2 + (self.centred or self.means) + (TAPS - 1) * self.conv)
        numbers += 2 * self.heads * (channels > 0)
        if keys:
            numbers += keys * (self.values + 1) + (TAPS - 1) * (keys + self.groups * self.skip)
        return numbers


class Conv(nn.Module):
    """A causal convolution per channel. It begins as the identity, or as a shift by `lag` tokens."""

    def __init__(self, channels: int, lag: int = 0):
        super().__init__()
        weight = torch.zeros(channels, TAPS)
        weight[:, TAPS - 1 - lag] = 1
        self.weight = nn.Parameter(weight)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BCT = pad(x_BTC.mT, (TAPS - 1, 0))
        return conv1d(x_BCT, self.weight[:, None], groups=len(self.weight)).mT


class Decays(nn.Module):
    """Log-decays of `heads` sums, [B, H, T], or [1, H, 1] if they are constant.

    Half-lives begin as a ladder from the first to the last; one more head never forgets.
    """

    forgets: Tensor

    def __init__(self, kind: Decay, heads: int, width: int, half_life: int = HALF_LIFE):
        super().__init__()
        self.kind = kind
        steps = torch.arange(heads) / max(1, heads - 2)
        log_rates = math.log(math.log(2) / half_life) - steps * math.log(LAST_HALF_LIFE / half_life)
        self.log_rate = nn.Parameter(log_rates) if kind != "none" else None
        self.of_input = nn.Linear(width, heads) if kind == "input" else None
        self.register_buffer("forgets", torch.arange(heads) < heads - 1, persistent=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.log_rate is None:
            return x_BTC.new_zeros(1, len(self.forgets), 1)
        rate_H = self.log_rate.exp() * self.forgets
        if self.of_input is None:
            return -rate_H[None, :, None]
        return -(rate_H * softplus(self.of_input(x_BTC) + math.log(math.e - 1))).mT


class Statistics(nn.Module):
    """Token statistics of heads, and a memory of slots beside them."""

    def __init__(self, form: Form, width: int, positions: int):
        super().__init__()
        self.form = form
        H, C = form.heads, width if form.channels is None else form.channels
        self.channels = C
        if C:
            self.in_proj = nn.Linear(width, C, bias=False)
            self.conv = Conv(C) if form.conv else nn.Identity()
            self.temp = nn.Parameter(torch.ones(H))
            self.denom_bias = nn.Parameter(torch.zeros((H, positions) if form.positions else H))
            self.decays = Decays(form.decay, H, width)
            self.centre = nn.Parameter(torch.ones(H)) if form.centred else None
            self.heads_out = HeadsOut(form, width, H, C // H)
            self.means_out = HeadsOut(form, width, H, C // H) if form.means else None
        if form.groups:
            self.slots = Slots(form, width)
            self.slots_out = HeadsOut(form, width, form.groups, form.values)
        self.out_proj = nn.Linear(C * (1 + form.means) + form.groups * form.values, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y = []
        if self.channels:
            w_BTHD = self.conv(self.in_proj(x_BTC)).unflatten(-1, (self.form.heads, -1))
            y_BTHD, means_BTHD = self.statistics(w_BTHD, self.decays(x_BTC))
            y.append(self.heads_out(y_BTHD, x_BTC))
            if self.means_out is not None:
                y.append(self.means_out(means_BTHD, x_BTC))
        if self.form.groups:
            y.append(self.slots_out(self.slots(x_BTC), x_BTC))
        return self.out_proj(torch.cat(y, -1))

    @torch.no_grad()
    def start(self) -> None:
        """Called after the initialization of all matrices."""
        if self.form.copying:
            key = self.slots.key.weight.unflatten(0, (self.form.groups, -1))[:, : self.form.slots]
            self.slots.query.weight.copy_(key.flatten(0, 1))
            self.slots.temp.fill_(COPYING_TEMP)
            values = [self.slots.value.weight] + ([self.in_proj.weight] if self.form.means else [])
            out = self.out_proj.weight[:, -sum(map(len, values)) :]
            out.copy_(torch.cat(values[::-1]).mT * (out.std() / values[0].std()))

    def statistics(self, w_BTHD: Tensor, log_BHT: Tensor) -> tuple[Tensor, Tensor]:
        """The operator and the means M / N, each [B, T, H, D]."""
        w = w_BTHD.transpose(1, 2)
        w_sq, (_, _, T, D) = w.square(), w.shape
        add = lambda v, log: resetting(decayed_sum, v, log=log, chunk=CHUNK, every=self.form.reset_every)
        energy = add(w_sq, log_BHT)
        shares = w_sq / energy.clamp_min(ENERGY_FLOOR)
        bias_HT = self.denom_bias[:, :T] if self.form.positions else self.denom_bias[:, None]
        if self.form.share:
            z_BHT = shares.sum(-1) + bias_HT * D
        else:
            count = add(w.new_ones(len(log_BHT), len(self.temp), T, 1), log_BHT)
            z_BHT = (count * shares).mean(-1) + bias_HT
        pi = (self.temp[:, None] * z_BHT).softmax(1)[..., None]
        first = [pi * w] if self.centre is not None or self.means_out is not None else []
        sums = add(torch.cat([pi, pi * w_sq, *first], -1), log_BHT)
        _, second, means = (sums / (sums[..., :1] + MASS_FLOOR)).split([1, D, len(first) * D], -1)
        if self.centre is not None:
            w = w - self.centre[:, None, None] * means
        return (-pi * w / (1 + second)).transpose(1, 2), means.transpose(1, 2)


class HeadsOut(nn.Module):
    """Norm and gate of the heads of a branch: [B, T, H, D] → [B, T, H·D]."""

    def __init__(self, form: Form, width: int, heads: int, channels: int):
        super().__init__()
        self.gate = nn.Linear(width, heads * channels, bias=False) if form.gate == "channel" else None
        self.norm = nn.Parameter(torch.ones(heads, channels)) if form.norm else None

    def forward(self, y_BTHD: Tensor, x_BTC: Tensor) -> Tensor:
        y_BTHD = y_BTHD if self.norm is None else rms(y_BTHD) * self.norm
        if self.gate is not None:
            y_BTHD = y_BTHD * self.gate(x_BTC).sigmoid().unflatten(-1, (y_BTHD.shape[2], -1))
        return y_BTHD.flatten(-2)


class Slots(nn.Module):
    """Means of values in slots: y = Σ_s Π^r_s · M_s / N_s, [B, T, G, U].

    A token is written to the slots that the key of the token before selects, at first. Its query selects what is read.
    """

    def __init__(self, form: Form, width: int):
        super().__init__()
        self.form = form
        keys = form.groups * (form.slots + form.skip)
        self.key = nn.Linear(width, keys, bias=False)
        self.query = nn.Linear(width, form.groups * form.slots, bias=False)
        self.value = nn.Linear(width, form.groups * form.values, bias=False)
        self.key_conv = Conv(keys, lag=1)
        self.temp = nn.Parameter(torch.full((2, form.groups), 2.0))
        self.decays = Decays(form.slot_decay, form.groups, width, form.slot_half_life)

    def forward(self, x_BTC: Tensor) -> Tensor:
        G, S = self.form.groups, self.form.slots
        heads = lambda x: x.unflatten(-1, (G, -1)).transpose(1, 2)
        scores = heads(self.key_conv(self.key(x_BTC))), heads(self.query(x_BTC))
        write, read = ((temp[:, None, None] * z).softmax(-1) for temp, z in zip(self.temp, scores, strict=True))
        write, value = write[..., :S], heads(self.value(x_BTC))
        every = self.form.reset_every
        log = self.decays(x_BTC)
        mass = resetting(decayed_sum, write, log=log, chunk=CHUNK, every=every) + MASS_FLOOR
        return resetting(decayed_read, read / mass, write, value, log=log, chunk=CHUNK, every=every).transpose(1, 2)


class Softmax(nn.Module):
    """Softmax attention with rotary embedding, in a window or not, and the same convolution."""

    def __init__(self, form: Form, width: int, positions: int):
        super().__init__()
        self.form = form
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.conv = Conv(3 * width) if form.conv else nn.Identity()
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv = self.conv(self.in_proj(x_BTC)).unflatten(-1, (3, self.form.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        position = torch.arange(x_BTC.shape[1], device=x_BTC.device)
        rotary = rotary_cos_sin(position, q.shape[-1], 10000.0, x_BTC.dtype)
        q, k, mask = apply_rotary(q, rotary), apply_rotary(k, rotary), None
        if self.form.window:
            distance = position[:, None] - position
            mask = (distance >= 0) & (distance < self.form.window)
        y_BHTD = scaled_dot_product_attention(q, k, v.contiguous(), attn_mask=mask, is_causal=mask is None)
        return self.out_proj(y_BHTD.transpose(1, 2).flatten(-2))


class Linear(nn.Module):
    """Linear attention with a scalar decay per head (by `input`, as Mamba-2 without write gate), gate and norm."""

    def __init__(self, form: Form, width: int, positions: int):
        super().__init__()
        self.form = form
        H = form.heads
        self.sizes = [H * form.slots, H * form.slots, H * form.values]
        self.in_proj = nn.Linear(width, sum(self.sizes), bias=False)
        self.conv = Conv(sum(self.sizes)) if form.conv else nn.Identity()
        self.decays = Decays(form.decay, H, width)
        self.gate = nn.Linear(width, self.sizes[-1], bias=False)
        self.norm = nn.Parameter(torch.ones(self.sizes[-1]))
        self.out_proj = nn.Linear(self.sizes[-1], width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv = nn.functional.silu(self.conv(self.in_proj(x_BTC))).split(self.sizes, -1)
        q, k, v = (x.unflatten(-1, (self.form.heads, -1)).transpose(1, 2) for x in qkv)
        every = self.form.reset_every
        q, k = (nn.functional.normalize(x, dim=-1) for x in (q, k))
        y = resetting(decayed_read, q, k, v, log=self.decays(x_BTC), chunk=CHUNK, every=every)
        y_BTC = rms(y.transpose(1, 2)).flatten(-2) * self.norm
        return self.out_proj(y_BTC * nn.functional.silu(self.gate(x_BTC)))


MIXERS = {"statistics": Statistics, "softmax": Softmax, "linear": Linear}


def rms(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
