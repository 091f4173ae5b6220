"""The operator over shards of the tokens and groups of the heads gives what one call gives: outputs, states in and out
and every gradient, on both fast backends."""

from typing import Any

import pytest
import torch
from agreement import NAMES, Call, draw_call, errors
from torch import Tensor

from tost_lm.ops import TssaState, causal_tssa
from tost_lm.ops.causal import Backend
from tost_lm.ops.phases import UniformMemberships
from tost_lm.ops.split import SequenceSplit
from tost_lm.parallel.collectives import all_gather, all_reduce
from tost_lm.parallel.config import ParallelConfig
from tost_lm.parallel.mesh import Axis, build_mesh
from tost_lm.parallel.sequence import RankShard
from tost_lm.parallel.tensor import SoftmaxOverRanks
from tost_lm.parallel.world import start_world
from tost_lm.testing import run_on_ranks

HEADS, CHANNELS = 4, 5
CALLS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((80, 80, 80), {"packed": False}),
    ((80, 80), {"packed": False, "membership": "energy-mean", "fresh": True}),
    ((7, 60, 1, 1, 11), {"membership": "energy-mean"}),  # a document across every cut
    ((20, 20, 20, 20), {"membership": "uniform"}),  # cuts between documents
    ((1, 78, 1), {}),
]
LENGTHS = {2: (37, 43), 4: (3, 33, 4, 40)}
"""Of the shards, by number of ranks."""


def drawn_calls(dtype: torch.dtype, backend: Backend) -> dict[int, Call]:
    """By number. Triton's interpreter takes long: it gets the packed ones, and whole rows in the kernels' own tests."""
    chosen = range(2 if backend == "triton" else 0, len(CALLS))
    return {i: draw_call(i, CALLS[i][0], HEADS, CHANNELS, **CALLS[i][1]).to(dtype) for i in chosen}


def run_on_mesh(sequence: int, tensor: int, dtype: torch.dtype, backend: Backend) -> dict[int, dict[str, Tensor]]:
    mesh = build_mesh(start_world("cpu"), ParallelConfig(sequence=sequence, tensor=tensor))
    calls = drawn_calls(dtype, backend)
    return {number: run_call(call, mesh.sequence, mesh.tensor, backend) for number, call in calls.items()}


def run_call(call: Call, sequence: Axis, tensor: Axis, backend: Backend) -> dict[str, Tensor]:
    """This rank's outputs and gradients put together with the others', as `Call.run` gives them for one process."""
    split = SequenceSplit(LENGTHS[sequence.size], sequence.rank) if sequence.size > 1 else None
    tokens = slice(split.start, split.end) if split else slice(None)
    group = HEADS // tensor.size
    heads = slice(tensor.rank * group, (tensor.rank + 1) * group)
    shard = RankShard(sequence, split) if split else None
    softmax = UniformMemberships(HEADS) if call.membership == "uniform" else SoftmaxOverRanks(tensor)
    dy, *d_state = call.d_outputs
    statistics = [x[:, heads] for x in call.state[:3]]
    inputs = (call.w[:, tokens, heads], call.temp[heads], call.bias[heads, tokens], *statistics)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    w, temp, bias, *initial = leaves
    y, final = causal_tssa(
        w, temp, bias, membership=call.membership,
        initial_state=TssaState(initial[0], initial[1], initial[2], call.state.count), output_final_state=True,
        cu_seqlens=call.cu_seqlens, backend=backend, shard=shard,
        heads=softmax if tensor.size > 1 else None,
    )  # fmt: skip
    assert final is not None
    assert torch.equal(final.count, call.state.count + torch.tensor(whole_lengths(call)))
    d_outputs = (dy[:, tokens, heads], *(x[:, heads] for x in d_state))
    gradients = torch.autograd.grad((y, *final[:3]), leaves, d_outputs, materialize_grads=True)
    found: dict[str, Tensor] = dict(zip(NAMES, (y.detach(), *(x.detach() for x in final[:3]), *gradients), strict=True))
    if shard:
        for name in ("y", "dw"):
            found[name] = shard.gather(found[name].transpose(1, 2).contiguous()).transpose(1, 2)
        found["d_bias"] = shard.gather(found["d_bias"][None, :, :, None])[0, :, :, 0]
        found["d_temp"] = all_reduce(found["d_temp"], sequence)
    if tensor.size > 1:
        head_dims = {"y": 2, "dw": 2, "d_temp": 0, "d_bias": 0}
        for name, x in found.items():
            found[name] = torch.cat(list(all_gather(x, tensor)()), head_dims.get(name, 1))
    return found


def whole_lengths(call: Call) -> list[int]:
    return [call.w.shape[1]] * len(call.w) if call.cu_seqlens is None else call.cu_seqlens.diff().tolist()


@pytest.mark.parametrize(
    ("sequence", "tensor", "backend"), [(4, 1, "chunked"), (2, 2, "chunked"), (1, 4, "chunked"), (2, 2, "triton")]
)
def test_ranks_equal_one_call(sequence: int, tensor: int, backend: Backend):
    dtype, bound = torch.float64, 1e-11
    if backend == "triton":
        pytest.importorskip("triton")
        dtype, bound = torch.float32, 1e-5
    calls = drawn_calls(dtype, backend)
    truths = {number: call.to(torch.float64).run("naive") for number, call in calls.items()}
    for found in run_on_ranks(run_on_mesh, sequence * tensor, sequence, tensor, dtype, backend):
        assert found.keys() == truths.keys()
        for number, truth in truths.items():
            wrong = errors(found[number], truth)
            if number == 1:  # gradients of a state that holds nothing are ratios of tiny numbers
                wrong.pop("d_energy")
            assert max(wrong.values()) < bound, (number, wrong)


def small_first_tokens() -> list[float]:
    """Errors in dw where one head takes nearly all of a document's small first tokens."""
    mesh = build_mesh(start_world("cpu"), ParallelConfig(tensor=2))
    worst = []
    for seed in range(8):
        call = draw_call(seed, (100,), HEADS, 64, fresh=True)
        call.w[:, :1] *= 1e-5
        call.w.copy_(call.w.float())
        ours = run_call(call.to(torch.float32), mesh.sequence, mesh.tensor, "chunked")
        worst.append(errors(ours, call.run("naive"))["dw"])
    return worst


def test_float32_holds_when_heads_are_on_several_ranks():
    # One head takes nearly all of a token there. On one rank: up to 1e-5; with one number a token sent back: 4e-2.
    assert max(run_on_ranks(small_first_tokens, 2)[0]) < 2e-5
