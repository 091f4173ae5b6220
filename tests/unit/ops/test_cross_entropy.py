"""The bounded loss against logits as a whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from tost_lm.ops.cross_entropy import IGNORED_LABEL, LOGITS_BYTES, linear_cross_entropy, portion_tokens


def _inputs(tokens, channels, words, dtype=torch.float64):
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape, dtype=dtype) for shape in ((tokens, channels), (words, channels)))
    labels = torch.randint(words, (tokens,))
    labels[::3] = IGNORED_LABEL
    return x.requires_grad_(), weight.requires_grad_(), labels


def _whole(x, weight, labels):
    nats = cross_entropy(linear(x, weight), labels, ignore_index=IGNORED_LABEL, reduction="none")
    return nats.sum(), nats


@given(tokens=st.integers(1, 40), words=st.integers(1, 30), portion=st.integers(1, 50))
@settings(max_examples=30, deadline=None)
def test_sum_nats_and_gradients_are_those_of_whole_logits(tokens, words, portion):
    x, weight, labels = _inputs(tokens, 5, words)
    ours, nats, _ = linear_cross_entropy(x, weight, labels, logits_bytes=portion * words * 8)
    reference, reference_nats = _whole(x, weight, labels)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(nats, reference_nats.detach(), rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(ours / 7, (x, weight))
    expected = torch.autograd.grad(reference / 7, (x, weight))
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_narrow_inputs_are_summed_in_float32(dtype, tolerance):
    x, weight, labels = _inputs(300, 32, 500)
    narrow = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
    ours, nats, _ = linear_cross_entropy(narrow[0], narrow[1], labels, logits_bytes=1 << 16)
    assert nats.dtype == ours.dtype == torch.float32
    wide = [t.detach().double().requires_grad_() for t in narrow]
    reference, _ = _whole(wide[0], wide[1], labels)
    torch.testing.assert_close(ours.double(), reference, rtol=tolerance, atol=0)
    for d, expected in zip(torch.autograd.grad(ours, narrow), torch.autograd.grad(reference, wide), strict=True):
        assert d.dtype == dtype
        assert (d.double() - expected).norm() <= tolerance * expected.norm()


def test_hot_logits_stay_finite():
    x, weight, labels = _inputs(8, 4, 6, torch.float32)
    ours, *_ = linear_cross_entropy(100 * x, 100 * weight, labels)
    reference, _ = _whole(100 * x, 100 * weight, labels)
    torch.testing.assert_close(ours, reference)
    assert torch.autograd.grad(ours, x)[0].isfinite().all()


class _Largest(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.nbytes)
        return result


@pytest.mark.parametrize("tokens", [1000, 8000])
def test_no_tensor_is_larger_than_the_budget_whatever_the_length(tokens):
    x, weight, labels = _inputs(tokens, 2, 2000, torch.float32)
    with _Largest() as largest:
        total, *_ = linear_cross_entropy(x, weight, labels, logits_bytes=1 << 18)
        total.backward()
    assert 1 << 17 < largest.bytes <= 1 << 18


def test_a_portion_has_at_least_a_token():
    assert portion_tokens(10**9, torch.bfloat16) == 1
    assert portion_tokens(50304, torch.bfloat16) == LOGITS_BYTES // (50304 * 6)
    assert portion_tokens(50304, torch.float32) == LOGITS_BYTES // (50304 * 4)


def test_a_second_backward_is_refused():
    x, weight, labels = _inputs(4, 2, 3)
    total, *_ = linear_cross_entropy(x, weight, labels)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        total.backward()


@pytest.mark.parametrize(("tokens", "words_at_once"), [(50, 1), (50, 2), (50, 99), (0, 2), (5000, 3)])
def test_without_gradients_top_labels_are_told_instead(tokens, words_at_once):
    x, weight, labels = _inputs(max(tokens, 9), 2, 5)
    labels = labels if tokens else torch.full_like(labels, IGNORED_LABEL)
    at_once = max(1, min(2048, int((labels != IGNORED_LABEL).sum())))
    with torch.no_grad():
        total, nats, is_top = linear_cross_entropy(x, weight, labels, logits_bytes=words_at_once * at_once * 8)
    assert not total.requires_grad
    assert not nats.requires_grad
    expected_total, expected = (t.detach() for t in _whole(x, weight, labels))
    torch.testing.assert_close(total, expected_total)
    torch.testing.assert_close(nats, expected)
    assert is_top is not None
    assert torch.equal(is_top, linear(x, weight).argmax(1) == labels)
    assert linear_cross_entropy(x, weight, labels).is_top_M is None


def test_without_gradients_logits_are_of_counted_labels_alone():
    x, weight, labels = _inputs(1000, 2, 2000, torch.float32)
    labels[3:] = IGNORED_LABEL
    with torch.no_grad(), _Largest() as largest:
        linear_cross_entropy(x, weight, labels)
    assert largest.bytes < 4 * 10 * 2000


def test_without_gradients_logits_may_be_as_large_as_they_get():
    x, weight = torch.full((1, 1), 300.0, dtype=torch.float16), torch.tensor([[-300.0]] * 3 + [[1.0]]).half()
    with torch.no_grad():
        _, nats, is_top = linear_cross_entropy(x, weight, torch.tensor([3]), logits_bytes=6)
    assert (nats.tolist(), is_top.tolist() if is_top is not None else None) == ([0.0], [True])


def test_labels_of_equal_logits_are_top():
    with torch.no_grad():
        is_top = linear_cross_entropy(torch.ones(3, 1), torch.tensor([[2.0], [2.0], [1.0]]), torch.arange(3)).is_top_M
    assert is_top is not None
    assert is_top.tolist() == [True, True, False]
