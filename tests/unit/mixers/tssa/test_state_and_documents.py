"""Tiles chained by state, packed documents and padding equal one call; single tokens do not drift."""

from typing import get_args

import pytest
import torch
from agreement import Call, documents, draw_call
from hypothesis import given, settings
from hypothesis import strategies as st
from random_calls import calls
from torch import Tensor

from tost_lm.mixers.tssa.causal import causal_tssa, tssa_step
from tost_lm.mixers.tssa.naive import Membership, TssaState
from tost_lm.testing import FLOAT32_REORDERED, assert_as_accurate, assert_close

MEMBERSHIPS = get_args(Membership)
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("chunks_of_32_tokens")]


def gradients(call: Call, f) -> list[Tensor]:
    """Outputs of `f(w, temp, bias, state) -> (y, state)`, and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in (call.w, call.temp, call.bias, *call.state[:3])]
    w, temp, bias, energy, weighted, mass = leaves
    y, final = f(w, temp, bias, TssaState(energy, weighted, mass, call.state.count))
    outputs = (y, *final[:3])
    return [*outputs, *torch.autograd.grad(outputs, leaves, call.d_outputs, materialize_grads=True)]


def assert_all_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max().clamp_min(1)


def whole(call: Call):
    return lambda w, temp, bias, state: causal_tssa(
        w, temp, bias, membership=call.membership, initial_state=state, output_final_state=True,
        cu_seqlens=call.cu_seqlens,
    )  # fmt: skip


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from(MEMBERSHIPS), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_tiles_chained_by_state_equal_one_call(tiles: list[int], membership: Membership, seed: int):
    call = draw_call(seed, (sum(tiles),) * 2, 3, 5, membership, packed=False)

    def tile_by_tile(w, temp, bias, state):
        ys = []
        for w_tile, bias_tile in zip(w.split(tiles, 1), bias.split(tiles, 1), strict=True):
            y, state = causal_tssa(
                w_tile, temp, bias_tile, membership=membership, initial_state=state, output_final_state=True
            )
            ys.append(y)
        return torch.cat(ys, 1), state

    assert_all_close(gradients(call, tile_by_tile), gradients(call, whole(call)))


@given(calls().filter(lambda call: call.cu_seqlens is not None))
@settings(max_examples=30, deadline=None)
def test_packed_documents_equal_separate_documents(call: Call):
    def one_by_one(w, temp, bias, state):
        ys, states = [], []
        for n, tokens in enumerate(documents(call)):
            row = TssaState(*(x[n : n + 1] for x in state))
            y, after = causal_tssa(
                w[:, tokens], temp, bias[:, tokens], membership=call.membership, initial_state=row,
                output_final_state=True,
            )  # fmt: skip
            ys.append(y)
            states.append(after)
        return torch.cat(ys, 1), TssaState(*(torch.cat(x) for x in zip(*states, strict=True)))

    assert_all_close(gradients(call, one_by_one), gradients(call, whole(call)))


def test_single_tokens_do_not_drift_after_a_long_past():
    """After 2^20 tokens, what 256 more add to float32 sums of that size would be wrong by up to 3 %."""
    torch.manual_seed(0)
    w, temp = torch.randn(1, 256, 4, 8), torch.ones(4)
    sums = torch.full((1, 4, 8), 2.0**20)
    past = TssaState(sums, sums, sums[..., 0], torch.tensor([2**20]))
    y_t, state = tssa_step(w[:, 0], temp, None, past)
    for t in range(1, 256):
        y_t, state = tssa_step(w[:, t], temp, None, state)
    past_64 = TssaState(sums.double(), sums.double(), sums[..., 0].double(), past.count)
    y, exact = causal_tssa(w.double(), temp.double(), initial_state=past_64, output_final_state=True, backend="naive")
    assert exact is not None
    in_float32, _ = causal_tssa(w, temp, initial_state=past, backend="naive")
    assert_as_accurate(y_t, in_float32[:, -1], y[:, -1])
    for after, before, truth in zip(state[:3], past[:3], exact[:3], strict=True):
        assert_close(after.double() - before, truth - before, FLOAT32_REORDERED)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_can_be_packed(side: str):
    """Pack the 3, 7 and 1 real tokens of three padded rows, and put the outputs back."""
    lengths, T = torch.tensor([3, 7, 1]), 7
    call = draw_call(1, (T, T, T), 2, 4, packed=False, fresh=True)
    columns = torch.arange(T)
    real = columns < lengths[:, None] if side == "right" else columns >= T - lengths[:, None]
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    y = torch.zeros_like(call.w)
    y[real] = causal_tssa(call.w[real][None], call.temp, cu_seqlens=cu_seqlens)[0][0]
    for row, length in enumerate(lengths.tolist()):
        alone, _ = causal_tssa(call.w[row][real[row]][None], call.temp)
        torch.testing.assert_close(y[row][real[row]], alone[0], rtol=1e-12, atol=1e-12)
        assert y[row][~real[row]].abs().sum() == 0
        assert real[row].sum() == length


@torch.inference_mode()
def test_packed_documents_in_inference_mode():
    w, temp, cu_seqlens = torch.randn(1, 10, 2, 3), torch.ones(2), torch.tensor([0, 4, 10], dtype=torch.int32)
    y, _ = causal_tssa(w, temp, cu_seqlens=cu_seqlens)
    assert torch.equal(y[:, 4:], causal_tssa(w[:, 4:], temp)[0])


def test_cu_seqlens_changed_in_place_are_read_again():
    w, temp = torch.randn(1, 10, 2, 3), torch.ones(2)
    cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32)
    causal_tssa(w, temp, cu_seqlens=cu_seqlens)
    cu_seqlens.data[1] = 7  # not seen by autograd's version counter
    y, _ = causal_tssa(w, temp, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(y[:, :7], causal_tssa(w[:, :7], temp)[0])
