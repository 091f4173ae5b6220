"""The compared mixers in plain PyTorch: slot memory and baselines.

Shapes: B sequences, T tokens, C channels, H heads, S keys (slots) of a head, V values of a head. Every mixer has short
causal convolutions, of which those of the keys begin as a shift by one token, an RMS norm for each head of its output,
and a sigmoid gate. Nothing here keeps a state between calls; `Form` counts what decoding would keep.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import conv1d, normalize, pad, rms_norm, scaled_dot_product_attention, silu, softplus

from experiments.forms.recurrences import (
    decayed_read,
    decayed_read_of_channels,
    decayed_sum,
    gated_delta_read,
    windowed_decays,
)
from tost_lm.config import Section
from tost_lm.ops.positions import apply_rotary, rotary_cos_sin
from tost_lm.ops.precision import MASS_FLOOR

TAPS = 4
"""Tokens that a short convolution reads."""
HALF_LIVES = 4.0, 512.0
"""First and last of the half-lives that heads or keys begin with."""
EPSILON = 1e-6
INITIAL_TEMP = 2.0
SOFTPLUS_OF_ONE = math.log(math.e - 1)


class Form(Section):
    """A mixer and its sizes."""

    mixer: Literal["slots", "overwriting", "delta", "mamba2", "hgrn2", "softmax"]
    heads: int = Field(default=2, gt=0)
    """Heads."""
    keys: int = Field(default=16, gt=0)
    """Slots, or channels of a key, of each head; not of softmax attention."""
    values: int = Field(default=32, gt=0)
    """Channels of the values of each head."""
    window: int = Field(default=0, ge=0)
    """Tokens that a token reads at most, of slots and softmax attention; 0: all."""
    rotary: bool = True
    """Whether softmax attention has rotary embedding."""

    @property
    def state_numbers(self) -> int | None:
        """Recurrent numbers of a layer, without the last tokens before convolutions; None: they grow with the text."""
        if self.mixer == "softmax":
            return 2 * self.window * self.heads * self.values if self.window else None
        return self.heads * self.keys * (self.values + (self.mixer == "slots"))

    @property
    def tap_numbers(self) -> int:
        """Numbers of the last tokens before the convolutions of a layer."""
        channels = self.keys if self.mixer in ("slots", "overwriting") else 2 * self.keys + self.values
        return (TAPS - 1) * self.heads * (3 * self.values if self.mixer == "softmax" else channels)


class Conv(nn.Module):
    """A causal convolution per channel. It begins as a shift by `lag` tokens; 0: the identity."""

    def __init__(self, channels: int, lag: int):
        super().__init__()
        weight = torch.zeros(channels, TAPS)
        weight[:, TAPS - 1 - lag] = 1
        self.weight = nn.Parameter(weight)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return conv1d(pad(x_BTC.mT, (TAPS - 1, 0)), self.weight[:, None], groups=len(self.weight)).mT


class Mixer(nn.Module):
    """Projects queries, keys and values of heads, lets `mix` read them, and norms, gates and projects the output."""

    convolved = "qkv"
    """Which of queries, keys and values have a convolution."""

    def __init__(self, form: Form, width: int):
        super().__init__()
        self.form, (H, S, V) = form, (form.heads, form.keys, form.values)
        sizes = {"q": H * S, "k": H * S, "v": H * V}
        if form.mixer == "softmax":
            sizes = dict.fromkeys("qkv", H * V)
        self.projections = nn.ModuleDict({name: nn.Linear(width, size, bias=False) for name, size in sizes.items()})
        self.convs = nn.ModuleDict({name: Conv(sizes[name], lag=int(name == "k")) for name in self.convolved})
        self.gate = nn.Linear(width, H * V, bias=False)
        self.norm = nn.Parameter(torch.ones(H * V))  # one dimension, as all below: no weight decay
        self.out_proj = nn.Linear(H * V, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        found = {name: project(x_BTC) for name, project in self.projections.items()}
        found |= {name: conv(found[name]) for name, conv in self.convs.items()}
        q, k, v = (found[name].unflatten(-1, (self.form.heads, -1)).transpose(1, 2) for name in "qkv")
        y_BTHV = self.mix(q, k, v, x_BTC).transpose(1, 2)
        y_BTE = rms_norm(y_BTHV, y_BTHV.shape[-1:], eps=EPSILON).flatten(-2) * self.norm
        return self.out_proj(y_BTE * self.gate(x_BTC).sigmoid())

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x_BTC: Tensor) -> Tensor:
        """[B, H, T, V] of queries and keys [B, H, T, S], values [B, H, T, V] and the input."""
        raise NotImplementedError

    def start(self) -> None:
        """Called after the initialization of all matrices."""


class Slots(Mixer):
    """Means of values in slots: y = Σ_s r_s M_s / N_s, the layer of experiments/slots.py."""

    convolved = "k"
    forgets: Tensor

    def __init__(self, form: Form, width: int):
        super().__init__(form, width)
        self.temp = nn.Parameter(torch.full((2 * form.heads,), INITIAL_TEMP))
        self.log_rate = nn.Parameter(ladder(form.heads, form.heads - 2))
        self.register_buffer("forgets", torch.arange(form.heads) < form.heads - 1, persistent=False)  # all but the last

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x_BTC: Tensor) -> Tensor:
        write, read = memberships(self.temp, k, q)
        log_BHT = -(self.log_rate.exp() * self.forgets)[None, :, None].expand(v.shape[:3])
        if self.form.window:
            decays = windowed_decays(log_BHT, self.form.window)
            return ((read / (decays @ write + MASS_FLOOR)) @ write.mT * decays) @ v
        return decayed_read(read / (decayed_sum(write, log_BHT) + MASS_FLOOR), write, v, log_BHT)


class OverwritingSlots(Mixer):
    """M_s ← (1 − β w_s) M_s + β w_s v, y = Σ_s r_s M_s: a slot that is written forgets, one that is not keeps all."""

    convolved = "k"

    def __init__(self, form: Form, width: int):
        super().__init__(form, width)
        self.temp = nn.Parameter(torch.full((2 * form.heads,), INITIAL_TEMP))
        self.strength = nn.Linear(width, form.heads)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x_BTC: Tensor) -> Tensor:
        write, read = memberships(self.temp, k, q)
        write = self.strength(x_BTC).sigmoid().mT[..., None] * write
        return decayed_read_of_channels(read, write, v, torch.log1p(-write.clamp_max(1 - EPSILON)))


class GatedDelta(Mixer):
    """Gated DeltaNet (arXiv 2412.06464)."""

    def __init__(self, form: Form, width: int):
        super().__init__(form, width)
        self.log_rate = nn.Parameter(ladder(form.heads))
        self.step, self.strength = (nn.Linear(width, form.heads) for _ in range(2))

    def start(self) -> None:
        nn.init.constant_(self.step.bias, SOFTPLUS_OF_ONE)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x_BTC: Tensor) -> Tensor:
        log_BHT = -(self.log_rate.exp() * softplus(self.step(x_BTC))).mT
        q, k = (normalize(silu(x), dim=-1) for x in (q, k))
        return gated_delta_read(q, k, silu(v), log_BHT, self.strength(x_BTC).sigmoid().mT)


class Mamba2(Mixer):
    """The recurrence of Mamba-2 (arXiv 2405.21060): Δ is both decay and write gate, and values also skip the memory."""

    def __init__(self, form: Form, width: int):
        super().__init__(form, width)
        self.log_rate = nn.Parameter(ladder(form.heads))
        self.step = nn.Linear(width, form.heads)
        self.skip = nn.Parameter(torch.ones(form.heads))

    def start(self) -> None:
        nn.init.constant_(self.step.bias, SOFTPLUS_OF_ONE)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x_BTC: Tensor) -> Tensor:
        delta_BTH = softplus(self.step(x_BTC))
        log_BHT, v = -(self.log_rate.exp() * delta_BTH).mT, silu(v)
        written = delta_BTH.mT[..., None] * silu(k)
        return decayed_read(silu(q), written, v, log_BHT) + self.skip[:, None, None] * v


class Hgrn2(Mixer):
    """HGRN2 (arXiv 2404.07904): each key channel has a forget gate f, and what is written has the weight 1 − f."""

    def __init__(self, form: Form, width: int):
        super().__init__(form, width)
        keep = (-ladder(form.keys).exp()).exp()  # of the half-lives of the ladder
        self.bias = nn.Parameter((keep / (1 - keep)).log().repeat(form.heads))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x_BTC: Tensor) -> Tensor:
        gate = k + self.bias.unflatten(0, (-1, 1, self.form.keys))
        return decayed_read_of_channels(silu(q), (-gate).sigmoid(), v, nn.functional.logsigmoid(gate))


class Softmax(Mixer):
    """Softmax attention with norms of queries and keys, over all tokens or a window."""

    def __init__(self, form: Form, width: int):
        super().__init__(form, width)
        self.scales = nn.Parameter(torch.ones(2 * form.values))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x_BTC: Tensor) -> Tensor:
        position = torch.arange(x_BTC.shape[1], device=x_BTC.device)
        scales = zip((q, k), self.scales.chunk(2), strict=True)
        q, k = (rms_norm(x, x.shape[-1:], eps=EPSILON) * scale for x, scale in scales)
        if self.form.rotary:
            rotary = rotary_cos_sin(position, (q.shape[-1], 10000.0), x_BTC.dtype)
            q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        mask = None
        if self.form.window:
            distance = position[:, None] - position
            mask = (distance >= 0) & (distance < self.form.window)
        return scaled_dot_product_attention(q, k, v.contiguous(), attn_mask=mask, is_causal=mask is None)


MIXERS: dict[str, type[Mixer]] = {
    "slots": Slots, "overwriting": OverwritingSlots, "delta": GatedDelta, "mamba2": Mamba2, "hgrn2": Hgrn2,
    "softmax": Softmax,
}  # fmt: skip


def memberships(temp: Tensor, *scores_BHTS: Tensor) -> tuple[Tensor, ...]:
    """The softmax over the slots of each head of some scores, which each have a temperature for each head."""
    pairs = zip(temp.chunk(len(scores_BHTS)), scores_BHTS, strict=True)
    return tuple((temp_H[:, None, None] * z).softmax(-1) for temp_H, z in pairs)


def ladder(count: int, last: int | None = None) -> Tensor:
    """log(ln 2 / half-life) of `count` half-lives, from HALF_LIVES[0] to HALF_LIVES[1] at index `last`."""
    steps = torch.arange(count) / max(1, count - 1 if last is None else last)
    return math.log(math.log(2) / HALF_LIVES[0]) - steps * math.log(HALF_LIVES[1] / HALF_LIVES[0])
