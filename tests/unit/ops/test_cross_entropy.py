"""The loss in tiles of logits against cross-entropy of all logits."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest import Largest
from torch.nn.functional import cross_entropy, linear

from tost_lm.ops import cross_entropy as loss
from tost_lm.ops.cross_entropy import IGNORED_LABEL, linear_cross_entropy
from tost_lm.testing import assert_as_accurate

pytestmark = pytest.mark.quick


def _inputs(tokens, channels, words, dtype=torch.float64):
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape, dtype=dtype) for shape in ((tokens, channels), (words, channels)))
    labels = torch.randint(words, (tokens,))
    labels[::3] = IGNORED_LABEL
    return x.requires_grad_(), weight.requires_grad_(), labels


def _sum_and_gradients(x, weight, labels, dtype, z_loss=0.0):
    x, weight = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
    total, *_ = _whole(x, weight, labels, z_loss)
    return total, *torch.autograd.grad(total, (x, weight))


def _whole(x, weight, labels, z_loss=0.0):
    logits = linear(x, weight)
    nats = cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="none")
    z = z_loss * logits.logsumexp(1)[labels != IGNORED_LABEL].square().sum()
    return nats.sum() + z, nats, z


def in_tiles(logits_bytes, x, weight, labels, z_loss=0.0):
    with patch.multiple(loss, LOGITS_BYTES=logits_bytes, CPU_SCORED_BYTES=logits_bytes):
        return linear_cross_entropy(x, weight, labels, z_loss=z_loss)


@given(
    tokens=st.integers(1, 40),
    words=st.integers(1, 30),
    tile_tokens=st.integers(1, 50),
    z_loss=st.sampled_from([0, 0.3]),
)
@settings(max_examples=30, deadline=None)
def test_sum_nats_and_gradients_equal_those_of_all_logits(tokens, words, tile_tokens, z_loss):
    x, weight, labels = _inputs(tokens, 5, words)
    ours, nats, _, z = in_tiles(tile_tokens * words * 8, x, weight, labels, z_loss)
    reference, reference_nats, reference_z = _whole(x, weight, labels, z_loss)
    torch.testing.assert_close(z, reference_z.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(nats, reference_nats.detach(), rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(ours / 7, (x, weight))
    expected = torch.autograd.grad(reference / 7, (x, weight))
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_summed_in_float32(dtype):
    x, weight, labels = _inputs(300, 32, 500)
    x, weight = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
    ours, nats, *_ = in_tiles(1 << 16, x, weight, labels, 0.01)
    assert nats.dtype == ours.dtype == torch.float32
    gradients = torch.autograd.grad(ours, (x, weight))
    assert {d.dtype for d in gradients} == {dtype}
    theirs, truth = (_sum_and_gradients(x, weight, labels, precision, 0.01) for precision in (dtype, torch.float64))
    for mine, reference, exact in zip((ours, *gradients), theirs, truth, strict=True):
        assert_as_accurate(mine, reference, exact)


def test_hot_logits_stay_finite():
    x, weight, labels = _inputs(8, 4, 6, torch.float32)
    x, weight = 100 * x, 100 * weight
    ours, *_ = linear_cross_entropy(x, weight, labels)
    theirs, truth = (
        _sum_and_gradients(x, weight, labels, precision)[0] for precision in (torch.float32, torch.float64)
    )
    assert_as_accurate(ours, theirs, truth)
    assert torch.autograd.grad(ours, x)[0].isfinite().all()


@pytest.mark.parametrize("tokens", [1000, 8000])
def test_no_tensor_is_larger_than_the_budget_at_any_length(tokens):
    x, weight, labels = _inputs(tokens, 2, 2000, torch.float32)
    with Largest() as largest:
        total, *_ = in_tiles(1 << 18, x, weight, labels)
        total.backward()
    assert 1 << 15 < largest.numbers <= 1 << 16


def test_a_second_backward_is_refused():
    x, weight, labels = _inputs(4, 2, 3)
    total, *_ = linear_cross_entropy(x, weight, labels)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        total.backward()


@pytest.mark.parametrize(("tokens", "words_at_once"), [(50, 1), (50, 2), (50, 99), (0, 2), (5000, 3)])
def test_without_gradients_top_labels_are_returned(tokens, words_at_once):
    x, weight, labels = _inputs(max(tokens, 9), 2, 5)
    labels = labels if tokens else torch.full_like(labels, IGNORED_LABEL)
    at_once = max(1, min(2048, int((labels != IGNORED_LABEL).sum())))
    with torch.no_grad():
        total, nats, is_top, _ = in_tiles(words_at_once * at_once * 8, x, weight, labels, 0.3)
    assert not total.requires_grad
    assert not nats.requires_grad
    expected_total, expected, _ = (t.detach() for t in _whole(x, weight, labels))
    torch.testing.assert_close(total, expected_total)
    torch.testing.assert_close(nats, expected)
    assert is_top is not None
    assert torch.equal(is_top, linear(x, weight).argmax(1) == labels)
    assert linear_cross_entropy(x, weight, labels).is_top_M is None


def test_without_gradients_only_counted_labels_get_logits():
    x, weight, labels = _inputs(1000, 2, 2000, torch.float32)
    labels[3:] = IGNORED_LABEL
    with torch.no_grad(), Largest() as largest:
        linear_cross_entropy(x, weight, labels)
    assert largest.numbers < 10 * 2000
