"""Slot memory against its formulas: float64 and float32, packed, stepped, very long."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tost_lm.mixers.slots.layer import initial_log_rates
from tost_lm.mixers.slots.memory import SlotSums, slot_memory, slot_memory_naive, slot_memory_step
from tost_lm.ops.layout import LocalDocuments
from tost_lm.testing import assert_as_accurate

pytestmark = pytest.mark.quick

H, S, V = 3, 5, 7
OFFSETS = [0, 1, 70, 71, 150, 200]


def drawn(B: int, T: int, dtype: torch.dtype = torch.float64, heads: int = H) -> list[Tensor]:
    """read, write, value and log_decay; the last head keeps everything."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    log_decay = torch.linspace(-0.5, 0, heads, dtype=torch.float64)
    values = [(2 * draw(B, T, heads, S)).softmax(-1), (2 * draw(B, T, heads, S)).softmax(-1), draw(B, T, heads, V)]
    return [x.to(dtype).requires_grad_() for x in (*values, log_decay)]


def documents(offsets: list[int]) -> LocalDocuments:
    return LocalDocuments.of(torch.tensor(offsets), 1, offsets[-1], None)


def rows(B: int, T: int) -> LocalDocuments:
    return LocalDocuments.of(None, B, T, None)


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad((y * weights).sum(), inputs))


@pytest.mark.parametrize("tokens", [1, 63, 64, 200])
def test_chunks_equal_the_formulas(tokens: int):
    inputs = drawn(2, tokens)
    y, state = slot_memory(*inputs, local=rows(2, tokens))
    expected = slot_memory_naive(*inputs)
    assert state is None
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients(y, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_packed_documents_equal_their_rows():
    inputs = drawn(1, OFFSETS[-1])
    read, write, value, log_decay = inputs
    y, _ = slot_memory(*inputs, local=documents(OFFSETS))
    parts = [slot_memory_naive(read[:, a:b], write[:, a:b], value[:, a:b], log_decay) for a, b in pairwise(OFFSETS)]
    expected = torch.cat(parts, 1)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients(y, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_float32_is_as_accurate_as_the_formulas_in_float32():
    exact, inputs = drawn(2, 200), drawn(2, 200, torch.float32)
    truth, ours, theirs = (
        slot_memory_naive(*exact),
        slot_memory(*inputs, local=rows(2, 200))[0],
        slot_memory_naive(*inputs),
    )
    assert_as_accurate(ours, theirs, truth)
    for d_ours, d_theirs, d_truth in zip(
        gradients(ours, inputs), gradients(theirs, inputs), gradients(truth, exact), strict=True
    ):
        assert_as_accurate(d_ours, d_theirs, d_truth)


def test_steps_equal_one_call():
    read, write, value, log_decay = drawn(2, 70)
    y, final = slot_memory(read, write, value, log_decay, local=rows(2, 70), output_final_state=True)
    state, steps = SlotSums(y.new_zeros(2, H, S, V), y.new_zeros(2, H, S)), []
    for t in range(70):
        y_t, state = slot_memory_step(read[:, t], write[:, t], value[:, t], log_decay, state)
        steps.append(y_t)
    torch.testing.assert_close(torch.stack(steps, 1), y, rtol=1e-12, atol=1e-12)
    assert final is not None
    for ours, theirs in zip(state, final, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_state_after_a_million_tokens_is_accurate():
    """float32 tokens in calls of 2¹⁵; the last head forgets nothing."""
    length, calls = 2**15, 2**5
    read, write, value, log_decay = (x.detach() for x in drawn(1, length, torch.float32, heads=2))
    state = exact = None
    for _ in range(calls):
        _, state = slot_memory(
            read, write, value, log_decay, local=rows(1, length), initial_state=state, output_final_state=True
        )
    tokens = (
        write[0, :, :, :, None] * torch.cat([value, torch.ones_like(value[..., :1])], -1)[0, :, :, None, :].double()
    )
    assert state is not None
    exact = calls * tokens[:, 1].sum(0)
    found = torch.cat([state.memory, state.mass[..., None]], -1)[0, 1]
    assert (found - exact).norm() <= 1e-5 * exact.norm()
    ages = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    exact = ((log_decay[0].double() * ages).exp()[:, None, None] * tokens[:, 0]).sum(0)
    found = torch.cat([state.memory, state.mass[..., None]], -1)[0, 0]
    assert (found - exact).norm() <= 1e-5 * exact.norm()


def test_a_nan_stays_in_its_head_and_its_document():
    inputs = [x.detach() for x in drawn(1, OFFSETS[-1])]
    clean, _ = slot_memory(*inputs, local=documents(OFFSETS))
    for n in (1, 2):
        broken = [x.clone() for x in inputs]
        broken[n][0, 100, 1, 0] = torch.nan
        y, _ = slot_memory(*broken, local=documents(OFFSETS))
        assert y[0, 100:150, 1, 0].isnan().all()
        y[0, 100:150, 1] = clean[0, 100:150, 1]
        torch.testing.assert_close(y, clean)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: (2, 9, H, S + 1)}, r"read and write must be \[B, T, H, S\]"),
        ({2: (2, 9, H)}, r"value must be floating point \[B, T, H, D\]"),
        ({3: (H + 1,)}, r"log_decay must be \[H\] = \[3\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict[int, tuple[int, ...]], message: str):
    inputs = [torch.zeros(change[n]) if n in change else x for n, x in enumerate(drawn(2, 9))]
    with pytest.raises(ValueError, match=message):
        slot_memory(*inputs, local=rows(2, 9))


def test_a_state_of_other_documents_is_refused():
    state = SlotSums(torch.zeros(3, H, S, V), torch.zeros(3, H, S))
    with pytest.raises(ValueError, match=r"the state must be \[2, 3, 5, 7\]"):
        slot_memory(*drawn(2, 9), local=rows(2, 9), initial_state=state)


@pytest.mark.parametrize(
    ("heads", "begin"),
    [(1, [2.0**20]), (2, [4, 2.0**20]), (5, [4, 512, *[2.0**20] * 3]), (6, [4, 2048**0.5, 512, *[2.0**20] * 3])],
)
def test_half_of_the_heads_hardly_forget_at_first(heads: int, begin: list[float]):
    half_lives = math.log(2) / initial_log_rates(heads).double().exp()
    torch.testing.assert_close(half_lives, torch.tensor(begin, dtype=torch.float64), rtol=1e-5, atol=0)
