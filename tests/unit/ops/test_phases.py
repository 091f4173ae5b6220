"""The phases take carries and heads from elsewhere: two shards of the tokens times two groups of the heads, each on a
thread of its own that sees the others' sums only, give what one call gives."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from types import ModuleType

import pytest
import torch
from agreement import Call, calls, draw_call, errors
from hypothesis import given, settings
from torch import Tensor

from tost_lm.ops import Membership, chunked, chunked_phases
from tost_lm.ops.composed import Composed
from tost_lm.ops.layout import document_layout
from tost_lm.ops.phases import Scoring
from tost_lm.ops.split import Pieces

CUT = 37
GROUPS = 2


class Exchange:
    """What ranks of one group pass each other: `gather` returns everybody's value, in their order."""

    def __init__(self, size: int):
        self.values: list[Tensor | None] = [None] * size
        self.barrier = Barrier(size, timeout=60)

    def gather(self, rank: int, value: Tensor) -> list[Tensor]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return [x for x in values if x is not None]


class SoftmaxOverGroups:
    """One log-sum-exp a token forward, one number a token backward."""

    def __init__(self, exchange: Exchange, rank: int):
        self.exchange, self.rank = exchange, rank

    def forward(self, z_MH: Tensor) -> Tensor:
        parts = torch.stack(self.exchange.gather(self.rank, z_MH.logsumexp(-1)), -1)
        return (z_MH - parts.logsumexp(-1, keepdim=True)).exp()

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        parts = self.exchange.gather(self.rank, (pi_MH * d_pi_MH).sum(-1))
        return pi_MH * (d_pi_MH - sum(parts)[:, None])  # pyright: ignore[reportOptionalSubscript, reportIndexIssue]


def run_rank(phases: ModuleType, call: Call, shard: int, group: int, shards: Exchange, groups: Exchange):
    """y, dw, d temp, d bias of one shard and group of heads, and the gradient of what came before all shards."""
    tokens = slice(0, CUT) if shard == 0 else slice(CUT, None)
    half = call.w.shape[2] // GROUPS
    heads = slice(group * half, (group + 1) * half)
    w = call.w[0, tokens, heads].contiguous()
    dy = call.d_outputs[0][0, tokens, heads].contiguous()
    layout = document_layout((0, len(w)), phases.chunk_tokens(half, w.shape[-1], w.device), w.device)
    count_N = call.state.count + (CUT if shard else 0)
    scoring = Scoring(call.membership, call.temp[heads], call.bias[None, heads, tokens], count_N)
    softmax = SoftmaxOverGroups(groups, group)
    initial = [x[:, heads] for x in call.state[:3]]
    d_final = [x[:, heads] for x in call.d_outputs[1:]]

    earlier: Callable[[Tensor, Tensor], Tensor] = lambda x, own: x + sum(shards.gather(shard, own)[:shard])
    later: Callable[[Tensor, Tensor], Tensor] = lambda x, own: x + sum(shards.gather(shard, own)[shard + 1 :])

    energy = phases.energy(w, layout)
    energy_KHD = energy.carried(earlier(initial[0], energy.document), layout)
    pi_MH, weighted, mass = phases.memberships(w, layout, scoring, energy_KHD, softmax)
    before = (
        energy_KHD,
        weighted.carried(earlier(initial[1], weighted.document), layout),
        mass.carried(earlier(initial[2], mass.document), layout),
    )
    y = phases.output(w, layout, pi_MH, *before[1:])

    d_weighted, d_mass = phases.output_backward(dy, w, layout, pi_MH, *before[1:])
    d_weighted_carry = later(d_final[1], d_weighted.document)
    d_mass_carry = later(d_final[2], d_mass.document)
    d_weighted_KHD = d_weighted.carried(d_weighted_carry, layout)
    d_z, d_temp, d_energy = phases.memberships_backward(
        dy, w, layout, scoring, pi_MH, *before, d_weighted_KHD, d_mass.carried(d_mass_carry, layout), softmax
    )
    d_energy_carry = later(d_final[0], d_energy.document)
    dw = phases.energy_backward(
        dy, w, layout, scoring, pi_MH, d_z, *before, d_energy.carried(d_energy_carry, layout), d_weighted_KHD
    )
    d_bias = (scoring.bias_scale(w.shape[-1]) * scoring.temp_H * d_z).T
    d_state = (
        d_energy_carry + d_energy.document, d_weighted_carry + d_weighted.document, d_mass_carry + d_mass.document
    )  # fmt: skip
    return y, dw, d_temp, d_bias, *d_state


@given(calls())
@settings(max_examples=25, deadline=None)
def test_composed_here_they_are_the_operator(call: Call):
    def composed(backend: str, pieces: Pieces, shard: None, rows: bool, apart: bool) -> Composed:
        return Composed(chunked_phases, pieces, shard, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tost_lm.ops.causal._passes", composed)
        patch.setattr(chunked_phases, "chunk_tokens", lambda *_: 16)
        ours = call.run("chunked")
    assert max(errors(ours, call.run("naive")).values()) < 1e-12


def let_one_thread_interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter swaps out its language while a kernel runs: one at a time."""
    from triton.runtime.interpreter import GridExecutor

    lock, run = Lock(), GridExecutor.__call__

    def run_alone(*arguments, **options):
        with lock:
            return run(*arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", run_alone)


@pytest.mark.parametrize("membership", ["energy-share", "energy-mean"])
@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_shards_and_head_groups_pass_sums_alone(backend: str, membership: Membership, monkeypatch: pytest.MonkeyPatch):
    if backend == "triton":
        pytest.importorskip("triton")
        from tost_lm.ops import triton as phases

        let_one_thread_interpret(monkeypatch)
    else:
        monkeypatch.setattr(chunked, "CPU_CHUNK_ELEMENTS", 1)
        phases = chunked_phases
    call = draw_call(0, (80,), 4, 5, membership)
    call = call.to(torch.float32 if backend == "triton" else torch.float64)
    shards = [Exchange(2) for _ in range(GROUPS)]
    groups = [Exchange(GROUPS) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        ranks = [
            [pool.submit(run_rank, phases, call, s, g, shards[g], groups[s]) for g in range(GROUPS)] for s in range(2)
        ]
        parts = [[future.result(timeout=120) for future in row] for row in ranks]

    truth = call.to(torch.float64).run("naive")
    join = lambda i: torch.cat([torch.cat([p[i] for p in row], 1) for row in parts], 0)
    ours = {
        "y": join(0)[None],
        "dw": join(1)[None],
        "d_temp": sum(torch.cat([p[2] for p in row]) for row in parts),
        "d_bias": torch.cat([torch.cat([p[3] for p in row], 0) for row in parts], 1),
    }
    for i, name in ((4, "d_energy"), (5, "d_weighted_energy"), (6, "d_mass")):
        ours[name] = torch.cat([part[i] for part in parts[0]], 1)
    for name, x in ours.items():
        error = (x.double() - truth[name]).abs().max() / truth[name].abs().max()
        assert error < (1e-5 if backend == "triton" else 1e-12), (name, error)
