"""A mixer of a short convolution, a decayed sum and a window, in plain PyTorch, into which errors are planted."""

from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from tost_lm.config import Section, validate
from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.plugins import register
from tost_lm.mixers.shape import MixerShape
from tost_lm.mixers.spec import MixerSpec
from tost_lm.model import ModelConfig
from tost_lm.ops.layout import SequenceSplit
from tost_lm.ops.positions import SequenceInfo
from tost_lm.parallel.mesh import Axis
from tost_lm.parallel.sequence import RankShard

CHANNELS, KERNEL, WINDOW = 4, 3, 4
Mutation = Literal[
    "later token visible",
    "sum leaks across documents",
    "convolution starts again at a cut",
    "gradient of the initial state too large",
    "gradient of the decay too large",
    "NaN spread by a triangular product",
    "documents raise",
    "a rank ignored",
    "gradient to other ranks ignored",
]

REACH = WINDOW + KERNEL - 1
"""Tokens that a token depends on without the decayed sum."""


class ToySettings(Section):
    mutation: Mutation | None = None
    decays: bool = True
    window: int | None = None
    """What the spec says."""


class ToySpec(MixerSpec):
    letter, name, tag, settings = "Y", "toy", "toy", ToySettings

    def description(self, shape: MixerShape) -> str:
        return "a toy"

    def kept_tokens(self, shape: MixerShape) -> int | None:
        return shape.own.window


class ToyState(NamedTuple):
    inputs: Tensor
    sum: Tensor
    window: Tensor
    tokens: Tensor

    def row(self, n: int) -> "ToyState":
        return ToyState(*(x[n : n + 1] for x in self))


class ToyMixer(TokenMixer):
    """u = convolution of x; y_t = Σ_{s ≤ t} ρ^(t−s)·u_s + softmax attention of u_t to u in the window."""

    State = ToyState

    def __init__(self, shape: MixerShape):
        super().__init__()
        self.mutation, self.decays = shape.own.mutation, shape.own.decays
        self.taps = nn.Parameter(torch.rand(KERNEL, CHANNELS))
        self.decay = nn.Parameter(torch.linspace(-1, 1, CHANNELS))

    def forward(self, x_BTC: Tensor, state: Any, info: SequenceInfo) -> tuple[Tensor, Any]:
        """On ranks, each rank gathers the tokens of all and keeps its own outputs."""
        here = slice(None)
        if info.shard is not None:
            here = slice(info.shard.split.start, info.shard.split.end)
            tokens_BTC = info.shard.gather(x_BTC[:, None])[:, 0]
            if self.mutation == "a rank ignored":
                tokens_BTC = torch.cat([torch.zeros_like(tokens_BTC[:, :1]), tokens_BTC[:, 1:]], 1)
            if self.mutation == "gradient to other ranks ignored":
                tokens_BTC = tokens_BTC.detach()
                tokens_BTC = torch.cat([tokens_BTC[:, : here.start], x_BTC, tokens_BTC[:, here.stop :]], 1)
            x_BTC = tokens_BTC
        if state is None:
            state = self.empty_state(x_BTC)
        y_BTC, final = self.documents(x_BTC, ToyState(*map(info.pad_rows, state)), info.cu_seqlens)  # pyright: ignore[reportArgumentType]
        return y_BTC[:, here], final if info.output_state else None

    def empty_state(self, like: Tensor) -> ToyState:
        B = len(like)
        inputs, window = (like.new_zeros(B, tokens, CHANNELS) for tokens in (KERNEL - 1, WINDOW - 1))
        return ToyState(inputs, like.new_zeros(B, CHANNELS), window, torch.zeros(B, dtype=torch.int64))

    def documents(self, x_BTC: Tensor, state: ToyState, cu_seqlens: Tensor | None) -> tuple[Tensor, ToyState]:
        if cu_seqlens is None:
            return self.mix(x_BTC, state)
        if self.mutation == "documents raise":
            raise NotImplementedError("packed documents\nare not supported")
        results: list[tuple[Tensor, ToyState]] = []
        for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            row = state.row(n)
            if n and self.mutation == "sum leaks across documents":
                row = row._replace(sum=row.sum + results[-1][1].sum)
            results.append(self.mix(x_BTC[:, start:end], row))
        ys, finals = zip(*results, strict=True)
        return torch.cat(ys, 1), ToyState(*map(torch.cat, zip(*finals, strict=True)))

    def mix(self, x_BTC: Tensor, state: ToyState) -> tuple[Tensor, ToyState]:
        T = x_BTC.shape[1]
        inputs, before = state.inputs, state.sum
        if self.mutation == "convolution starts again at a cut":
            inputs = torch.zeros_like(inputs)
        if self.mutation == "gradient of the initial state too large":
            before = with_larger_gradient(before)
        inputs = torch.cat([inputs, x_BTC], 1)
        u_BTC = sum((tap * inputs[:, i : i + T] for i, tap in enumerate(self.taps)), torch.zeros_like(x_BTC))
        if self.mutation == "later token visible":
            u_BTC = u_BTC + 0.1 * pad(u_BTC[:, 1:], (0, 0, 0, 1))
        recent = torch.cat([state.window, u_BTC], 1)
        y_BTC = self.attend(u_BTC, recent[:, -(T + WINDOW - 1) :], state.tokens)
        if self.decays:
            sums_BTC = self.decayed_sums(u_BTC, before)
            y_BTC, before = y_BTC + sums_BTC, sums_BTC[:, -1]
        return y_BTC, ToyState(inputs[:, -(KERNEL - 1) :], before, recent[:, -(WINDOW - 1) :], state.tokens + T)

    def attend(self, u_BTC: Tensor, recent_BSC: Tensor, count_B: Tensor) -> Tensor:
        """Each token is multiplied with its own window only, so that a NaN stays there."""
        seen_BTCW = recent_BSC.unfold(1, WINDOW, 1)
        scores_BTW = (u_BTC[..., None] * seen_BTCW).sum(-2)
        tokens_BT = count_B[:, None] + torch.arange(1, u_BTC.shape[1] + 1)
        exists = torch.arange(WINDOW, 0, -1) <= tokens_BT[..., None]
        return (scores_BTW.masked_fill(~exists, -torch.inf).softmax(-1)[:, :, None] * seen_BTCW).sum(-1)

    def decayed_sums(self, u_BTC: Tensor, before_BC: Tensor) -> Tensor:
        rho_C = self.decay.sigmoid()
        if self.mutation == "gradient of the decay too large":
            rho_C = with_larger_gradient(rho_C)
        if self.mutation == "NaN spread by a triangular product":
            age_TT = torch.arange(u_BTC.shape[1])[:, None] - torch.arange(u_BTC.shape[1])
            factors_TTC = (rho_C ** age_TT[..., None]).where(age_TT[..., None] >= 0, 0)
            first = rho_C ** torch.arange(1, u_BTC.shape[1] + 1)[:, None] * before_BC[:, None]
            return first + torch.einsum("tsc,bsc->btc", factors_TTC, u_BTC)
        sums = []
        for u_BC in u_BTC.unbind(1):
            before_BC = rho_C * before_BC + u_BC
            sums.append(before_BC)
        return torch.stack(sums, 1)


def with_larger_gradient(x: Tensor) -> Tensor:
    return 1.25 * x - 0.25 * x.detach()


def rank_shard(split: SequenceSplit) -> RankShard:
    return RankShard(Axis(split.rank, len(split.lengths), dist.group.WORLD), split)


def toy_config(**settings: Any) -> ModelConfig:
    register(ToySpec(), ToyMixer)
    shape = {"pattern": "Y", "layers": 1, "heads": 1, "width": CHANNELS, "plugin_settings": {"Y": settings}}
    return validate(ModelConfig, shape, "test")
