"""A mixer of a short convolution, a decayed sum and a window, in plain PyTorch, into which errors are planted."""

from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from tost_lm.ops.layout import SequenceShard, SequenceSplit
from tost_lm.parallel.mesh import Axis
from tost_lm.parallel.sequence import RankShard
from tost_lm.testing.conformance import MixerAdapter

CHANNELS, KERNEL, WINDOW = 4, 3, 4
State = dict[str, Tensor]
Mutation = Literal[
    "later token visible",
    "sum leaks across documents",
    "convolution reaches across documents",
    "convolution starts again at a cut",
    "window of the state too short",
    "window too long",
    "final state detached",
    "gradient of the initial state too large",
    "gradient of the decay too large",
    "NaN spread by a triangular product",
    "a rank ignored",
    "gradient to other ranks ignored",
]

REACH = WINDOW + KERNEL - 1
"""Tokens that a token depends on without the decayed sum."""


class ToyMixer(nn.Module):
    """u = convolution of x; y_t = Σ_{s ≤ t} ρ^(t−s)·u_s + softmax attention of u_t to u in the window."""

    def __init__(self, mutation: Mutation | None, decays: bool):
        super().__init__()
        self.mutation, self.decays = mutation, decays
        self.window = WINDOW + (mutation == "window too long")
        self.taps = nn.Parameter(torch.rand(KERNEL, CHANNELS))
        self.decay = nn.Parameter(torch.linspace(-1, 1, CHANNELS))

    def forward(self, x_BTC: Tensor, state: State, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        """`state` has a row for each document."""
        if cu_seqlens is None:
            return self.mix(x_BTC, state)
        results: list[tuple[Tensor, State]] = []
        for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            row = {name: x[n : n + 1] for name, x in state.items()}
            if n and self.mutation == "sum leaks across documents":
                row["sum"] = row["sum"] + results[-1][1]["sum"]
            if n and self.mutation == "convolution reaches across documents":
                row["inputs"] = row["inputs"] + results[-1][1]["inputs"]
            results.append(self.mix(x_BTC[:, start:end], row))
        final = {name: torch.cat([row[name] for _, row in results]) for name in state}
        return torch.cat([y for y, _ in results], 1), final

    def mix(self, x_BTC: Tensor, state: State) -> tuple[Tensor, State]:
        T = x_BTC.shape[1]
        inputs, before = state["inputs"], state["sum"]
        if self.mutation == "convolution starts again at a cut":
            inputs = torch.zeros_like(inputs)
        if self.mutation == "gradient of the initial state too large":
            before = with_larger_gradient(before)
        inputs = torch.cat([inputs, x_BTC], 1)
        u_BTC = sum((tap * inputs[:, i : i + T] for i, tap in enumerate(self.taps)), torch.zeros_like(x_BTC))
        if self.mutation == "later token visible":
            u_BTC = u_BTC + 0.1 * pad(u_BTC[:, 1:], (0, 0, 0, 1))
        recent = torch.cat([state["window"], u_BTC], 1)
        y_BTC = self.attend(u_BTC, recent[:, -(T + self.window - 1) :], state["count"])
        if self.decays:
            sums_BTC = self.decayed_sums(u_BTC, before)
            y_BTC, before = y_BTC + sums_BTC, sums_BTC[:, -1]
        kept = recent[:, -(self.window - 1) :]
        if self.mutation == "window of the state too short":
            kept = kept * (torch.arange(self.window - 1) > 0)[:, None]
        final = {"inputs": inputs[:, -(KERNEL - 1) :], "sum": before, "window": kept, "count": state["count"] + T}
        if self.mutation == "final state detached":
            final["sum"] = final["sum"].detach()
        return y_BTC, final

    def attend(self, u_BTC: Tensor, recent_BSC: Tensor, count_B: Tensor) -> Tensor:
        """Each token is multiplied with its own window only, so that a NaN stays there."""
        seen_BTCW = recent_BSC.unfold(1, self.window, 1)
        scores_BTW = (u_BTC[..., None] * seen_BTCW).sum(-2)
        tokens_BT = count_B[:, None] + torch.arange(1, u_BTC.shape[1] + 1)
        exists = torch.arange(self.window, 0, -1) <= tokens_BT[..., None]
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


def call(
    mixer: ToyMixer,
    x_BTC: Tensor,
    *,
    state: State | None,
    cu_seqlens: Tensor | None,
    shard: SequenceShard | None,
    **_: Any,
) -> tuple[Tensor, State]:
    """On ranks, each rank gathers the tokens of all and keeps its own outputs."""
    here = slice(None)
    if shard is not None:
        here = slice(shard.split.start, shard.split.end)
        tokens_BTC = shard.gather(x_BTC[:, None])[:, 0]
        if mixer.mutation == "a rank ignored":
            tokens_BTC = torch.cat([torch.zeros_like(tokens_BTC[:, :1]), tokens_BTC[:, 1:]], 1)
        if mixer.mutation == "gradient to other ranks ignored":
            tokens_BTC = tokens_BTC.detach()
            tokens_BTC = torch.cat([tokens_BTC[:, : here.start], x_BTC, tokens_BTC[:, here.stop :]], 1)
        x_BTC = tokens_BTC
    documents = len(x_BTC) if cu_seqlens is None else len(cu_seqlens) - 1
    given = {} if state is None else state
    missing = documents - (len(given["sum"]) if given else 0)
    empty = empty_state(missing, mixer.window, x_BTC)
    initial = {name: torch.cat([given[name], x]) if given else x for name, x in empty.items()}
    y_BTC, final = mixer(x_BTC, initial, cu_seqlens)
    return y_BTC[:, here], final


def empty_state(documents: int, window: int, like: Tensor) -> State:
    shapes = {"inputs": (KERNEL - 1, CHANNELS), "sum": (CHANNELS,), "window": (window - 1, CHANNELS)}
    zeros = {name: like.new_zeros(documents, *shape) for name, shape in shapes.items()}
    return {**zeros, "count": torch.zeros(documents, dtype=torch.int64)}


def rank_shard(split: SequenceSplit) -> RankShard:
    return RankShard(Axis(split.rank, len(split.lengths), dist.group.WORLD), split)


def toy_adapter(mutation: Mutation | None = None, decays: bool = True, **fields: Any) -> MixerAdapter:
    return MixerAdapter("toy", CHANNELS, partial(ToyMixer, mutation, decays), call, **fields)
