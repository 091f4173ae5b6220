"""Slot memory, a token mixer with a state of constant size, in plain PyTorch: a plugin.

    tost train demo 'model.plugins=["experiments/slots.py"]' model.pattern=S run.name=slots

Other commands find it through TOST_PLUGINS. docs/experiments.md compares it with other mixers: it recalls less than the
gated delta rule at an equal loss, so it is not one of the library's mixers.

Each head has S slots. A token is written to them with memberships w, a softmax of its key over the slots, and reads
them with memberships r, a softmax of its query. M/N is the decayed mean of the values u in a slot; each head learns ρ:

    M_t = ρ M_{t−1} + w_t ⊗ u_t        N_t = ρ N_{t−1} + w_t        y_t = Σ_s r_{t,s} · M_{t,s} / (N_{t,s} + 1e-8)

The key passes through a convolution that begins as a shift by one token, so a value is stored under the token before
it. The parts are known: with eᵏ in place of w and without decay, it is causal Efficient Attention (arXiv 1812.01243);
the softmax over slots is that of Slot Attention (2006.15055), the shift that of H3 (2212.14052). ABC (2110.02488) and
Gated Slot Attention (2409.07146) also store keys, so that the text changes the address of a slot.

Shapes: B sequences, b rows of equal length, T tokens, C channels, H heads, S slots and V value channels of a head,
E = V + 1 (M and N side by side), K taps, L tokens of a chunk, N documents, n of them with tokens on this rank.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm

from tost_lm.config import Section
from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.plugins import register
from tost_lm.mixers.shape import MixerShape
from tost_lm.mixers.spec import RecurrentSpec
from tost_lm.ops.exchange import Decay, exchange
from tost_lm.ops.initialization import InitialValue, set_own_constants
from tost_lm.ops.layout import LocalDocuments
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.precision import MASS_FLOOR, running_dtype, statistics_dtype
from tost_lm.ops.short_conv import CONVOLUTION

CONV_TAPS = 4
CHUNK_TOKENS = 32
INITIAL_TEMP = 2.0
SHORTEST_HALF_LIFE, LONGEST_HALF_LIFE, LASTING_HALF_LIFE = 4.0, 512.0, 2.0**20
NORM_EPSILON = 1e-6


class SlotsSettings(Section):
    """`model.plugin_settings.S`."""

    per_head: int = Field(default=16, gt=0)
    """Slots of each head."""
    value_size: int = Field(default=28, gt=0)
    """Channels of the values of each head."""


class Sizes(NamedTuple):
    """H, S and V."""

    heads: int
    slots: int
    values: int

    @classmethod
    def of(cls, shape: MixerShape) -> "Sizes":
        return cls(shape.heads, shape.own.per_head, shape.own.value_size)


class SlotsSpec(RecurrentSpec):
    letter, name, tag, settings = "S", "slot memory", "slot-memory", SlotsSettings

    def description(self, shape: MixerShape) -> str:
        return "slot memory, linear in time"


class SlotState(NamedTuple):
    """The state after some tokens; zeros before the first one."""

    sums: Tensor
    """M and N side by side, [N, H, S, E], in the dtype of running sums."""
    taps: Tensor
    """The last K − 1 keys before the convolution, [N, K − 1, H·S]."""

    def to_running_dtype(self) -> "SlotState":
        return self


class SlotMixer(TokenMixer):
    """A token is written to the slots that the key of the tokens before it selects, and reads those that its query
    selects; the output of each head has a norm and a gate."""

    State, FIXED_STATE = SlotState, True
    OF_HEADS = ("conv", "write_temp", "read_temp", "log_rate", "norm")

    def __init__(self, shape: MixerShape):
        super().__init__()
        self.heads, self.slots, self.values = H, S, V = Sizes.of(shape)
        self.in_proj = nn.Linear(shape.width, 2 * H * (S + V), bias=shape.bias)
        self.out_proj = nn.Linear(H * V, shape.width, bias=shape.bias)
        self.conv = nn.Parameter(torch.empty(H, S, CONV_TAPS))
        self.write_temp, self.read_temp, self.log_rate = (nn.Parameter(torch.empty(H)) for _ in range(3))
        self.norm = nn.Parameter(torch.empty(H, V))
        set_own_constants(self)

    def initial_values(self) -> dict[str, InitialValue]:
        conv = torch.zeros(self.conv.shape, device="cpu")
        conv[..., -2] = 1
        temps = dict.fromkeys(("write_temp", "read_temp"), INITIAL_TEMP)
        return {"conv": conv, **temps, "log_rate": initial_log_rates(self.heads), "norm": 1.0}

    def forward(self, x_BTC: Tensor, state: SlotState | None, info: SequenceInfo) -> tuple[Tensor, SlotState | None]:
        S, V = self.slots, self.values
        heads_BTHE = self.in_proj(x_BTC).unflatten(-1, (self.heads, -1))
        key, query, value_BTHV, gate_BTHV = heads_BTHE.split([S, S, V, V], -1)
        tensors = [key.flatten(-2), self.conv.flatten(0, 1), state.taps if state else None, info.state_offsets]
        key_BTE, *taps = CONVOLUTION(info, info.handle, tensors, info.wanted_state)
        with torch.autocast(x_BTC.device.type, enabled=False):
            write = memberships(key_BTE.unflatten(-1, (self.heads, S)), self.write_temp)
            read, dtype = memberships(query, self.read_temp), write.dtype
            log_decay_H, sums = -self.log_rate.to(dtype).exp(), info.pad_rows(state.sums) if state else None
            y_BTHV, sums = remember(read, write, value_BTHV.to(dtype), log_decay_H, sums, info)
        y_BTHV = rms_norm(y_BTHV.to(value_BTHV.dtype), (V,), eps=NORM_EPSILON) * self.norm * gate_BTHV.sigmoid()
        return self.out_proj(y_BTHV.flatten(-2)), SlotState(info.select_rows(sums), *taps) if taps else None


def memberships(scores_BTHS: Tensor, temp_H: Tensor) -> Tensor:
    """The softmax over the slots of each head, in the statistics dtype."""
    dtype = statistics_dtype(scores_BTHS)
    return (temp_H.to(dtype)[:, None] * scores_BTHS.to(dtype)).softmax(-1)


def initial_log_rates(heads: int) -> Tensor:
    """log(ln 2 / half-life) of each head: a ladder from 4 to 512 tokens, then as many heads that hardly forget."""
    forgetting = heads // 2
    ratio = (LONGEST_HALF_LIFE / SHORTEST_HALF_LIFE) ** (1 / max(1, forgetting - 1))
    half_lives = [SHORTEST_HALF_LIFE * ratio**h for h in range(forgetting)]
    half_lives += [LASTING_HALF_LIFE] * (heads - forgetting)
    return torch.tensor([math.log(math.log(2) / half_life) for half_life in half_lives], device="cpu")


def remember(
    read: Tensor, write: Tensor, value: Tensor, log_decay_H: Tensor, initial_NHSE: Tensor | None, info: SequenceInfo
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] of all documents, and M and N after each, [N, H, S, E]; those of other ranks' tokens are added."""
    local, running = info.local, running_dtype(value.device)
    per_document = initial_NHSE is not None or bool(info.output_state)
    if initial_NHSE is None:
        initial_NHSE = value.new_zeros(len(local.whole_lengths), *write.shape[2:], value.shape[-1] + 1, dtype=running)
    before_nHSE = initial_NHSE.to(running)[local.documents]
    if info.shard is None:
        return in_documents(read, write, value, log_decay_H, before_nHSE, local)
    _, added_nHSE = in_documents(read, write, value, log_decay_H, torch.zeros_like(before_nHSE), local)
    states = initial_NHSE.to(running).flatten(1), added_nHSE.flatten(1)
    decay_C = log_decay_H.to(running).repeat_interleave(added_nHSE[0, 0].numel())
    before, final = exchange(info.shard, local, Decay, *states, decay_C, per_document=per_document)
    y_BTHV, _ = in_documents(read, write, value, log_decay_H, before.view_as(before_nHSE), local)
    return y_BTHV, initial_NHSE if final is None else final.view_as(initial_NHSE)


def in_documents(
    read: Tensor, write: Tensor, value: Tensor, log_decay_H: Tensor, before_nHSE: Tensor, local: LocalDocuments
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] of this rank's documents and M and N after each, from those before each."""
    if not local.packed:
        return in_rows(read, write, value, log_decay_H, before_nHSE)
    cuts = [slice(*cut) for cut in pairwise(local.offsets)]
    found = [
        in_rows(read[:, cut], write[:, cut], value[:, cut], log_decay_H, before_nHSE[n : n + 1])
        for n, cut in enumerate(cuts)
    ]
    y_1THV, final_nHSE = zip(*found, strict=True)
    return torch.cat(y_1THV, 1), torch.cat(final_nHSE)


def in_rows(
    read: Tensor, write: Tensor, value: Tensor, log_decay_H: Tensor, sums_bHSE: Tensor
) -> tuple[Tensor, Tensor]:
    """y [b, T, H, V] and M and N after the rows, from those before them, chunk by chunk."""
    gaps_HLL, since_HL1 = decays(log_decay_H, min(CHUNK_TOKENS, read.shape[1]))
    outputs, log_running_H11 = [], log_decay_H.to(sums_bHSE.dtype)[:, None, None]
    chunks = zip(*(x.transpose(1, 2).split(CHUNK_TOKENS, 2) for x in (read, write, value)), strict=True)
    for read_c, write_c, value_c in chunks:
        L = read_c.shape[2]
        before, gaps = sums_bHSE.to(value.dtype), gaps_HLL[:, :L, :L]
        outputs.append(read_chunk(read_c, write_c, value_c, before, gaps, since_HL1[:, :L]))
        added_bHSE = (write_c * gaps[:, -1, :, None]).mT @ pad(value_c, (0, 1), value=1.0)
        sums_bHSE = (L * log_running_H11).exp() * sums_bHSE + added_bHSE.to(sums_bHSE.dtype)
    return torch.cat(outputs, 2).transpose(1, 2), sums_bHSE


def decays(log_decay_H: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """ρ^(t − j) from the token j that writes to the token t that reads, [H, L, L], and since the chunk, [H, L, 1]."""
    token_L = torch.arange(L, device=log_decay_H.device)
    age_LL = token_L[:, None] - token_L
    gaps_HLL = (log_decay_H[:, None, None] * age_LL).masked_fill(age_LL < 0, -torch.inf).exp()
    return gaps_HLL, (log_decay_H[:, None, None] * (token_L[:, None] + 1)).exp()


def read_chunk(
    read: Tensor, write: Tensor, value: Tensor, before_bHSE: Tensor, gaps_HLL: Tensor, since_HL1: Tensor
) -> Tensor:
    """[b, H, L, V]. A product would carry a NaN to earlier tokens, as 0 · NaN; it is added to the later ones."""
    broken_bHL = 0 * (write.sum(-1) + value.sum(-1))
    write, value = (x.where(x.isfinite(), 0) for x in (write, value))
    mass = gaps_HLL @ write + since_HL1 * before_bHSE[..., None, :, -1] + MASS_FLOOR
    share = read / mass
    y_bHLV = ((share @ write.mT) * gaps_HLL) @ value + (since_HL1 * share) @ before_bHSE[..., :-1]
    return y_bHLV + broken_bHL.cumsum(-1)[..., None]


register(SlotsSpec(), SlotMixer)
