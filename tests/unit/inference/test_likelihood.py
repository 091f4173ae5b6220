"""Scores against a forward pass for every token, and windows that score each token once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tost_lm.inference.likelihood import score_requests
from tost_lm.inference.requests import Request, disjoint_windows, strided_windows
from tost_lm.testing import FLOAT32_REORDERED

pytestmark = pytest.mark.quick

VOCAB = 40


def drawn_requests(shapes: list[tuple[int, int]]) -> list[Request]:
    draws = np.random.default_rng(0)
    return [Request(draws.integers(0, VOCAB, before), draws.integers(0, VOCAB, target)) for before, target in shapes]


SHAPES = [(1, 1), (1, 9), (5, 1), (12, 3), (3, 3), (7, 10), (1, 16)]


@torch.inference_mode()
def brute_force(model, request: Request) -> tuple[float, bool]:
    """A forward pass for every token."""
    ids, nats, is_greedy = [*request.context, *request.target], 0.0, True
    for end in range(len(request.context), len(ids)):
        logits_V = model(torch.tensor([ids[:end]])).logits[0, -1]
        nats -= torch.log_softmax(logits_V, dim=-1)[ids[end]].item()
        is_greedy &= int(logits_V.argmax()) == ids[end]
    return nats, is_greedy


@pytest.mark.parametrize("pattern", ["T", "TA", "D"])
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-9), (torch.float32, FLOAT32_REORDERED)])
def test_scores_equal_a_pass_for_every_token(make_model, pattern, dtype, relative):
    model, requests = make_model(pattern).to(dtype), drawn_requests(SHAPES)
    scores = score_requests(model, requests, batch_tokens=40)
    expected, _ = zip(*[brute_force(model, request) for request in requests], strict=True)
    np.testing.assert_allclose(scores.nats, expected, rtol=relative)
    assert scores.tokens.tolist() == [target for _, target in SHAPES]


@pytest.mark.parametrize("batch_tokens", [1, 30, 1000])
def test_scores_do_not_depend_on_the_batch(make_model, batch_tokens):
    model, requests = make_model().double(), drawn_requests(SHAPES)
    expected = score_requests(model, requests, batch_tokens=50)
    np.testing.assert_allclose(score_requests(model, requests, batch_tokens).nats, expected.nats, rtol=1e-12)


@torch.inference_mode()
def test_targets_of_most_likely_tokens_are_greedy(make_model):
    model, requests = make_model("TA").double(), []
    for request in drawn_requests(SHAPES):
        ids = request.context.tolist()
        for _ in request.target:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        written = np.array(ids[len(request.context) :])
        other = written.copy()
        other[-1] = (other[-1] + 1) % VOCAB
        requests += [Request(request.context, written), Request(request.context, other)]
    scores = score_requests(model, requests, batch_tokens=64)
    assert scores.is_greedy.tolist() == [True, False] * len(SHAPES)
    assert [brute_force(model, request)[1] for request in requests] == scores.is_greedy.tolist()


@given(st.integers(1, 60), st.integers(1, 20), st.booleans())
def test_disjoint_windows_score_each_token_once(tokens: int, window: int, fill_last: bool):
    ids = np.arange(1, tokens + 1)
    windows = list(disjoint_windows(ids, 0, window, fill_last=fill_last))
    assert np.concatenate([request.target for request in windows]).tolist() == ids.tolist()
    for request in windows:
        read = np.concatenate(request)
        assert read.tolist() == list(range(read[0], read[0] + len(read)))
        assert request.inputs <= window
    lengths = {request.inputs for request in windows[:-1] if len(windows) > 1}
    assert lengths <= {window}
    if fill_last:
        assert windows[-1].inputs == min(window, tokens)


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_strided_windows_are_those_of_hugging_faces_guide(tokens: int, window: int, data: st.DataObject):
    stride = data.draw(st.integers(1, window))
    found = [(r.context.tolist(), r.target.tolist()) for r in strided_windows(np.arange(tokens), window, stride)]
    expected, ended = [], 0
    for begin in range(0, tokens, stride):
        end = min(begin + window, tokens)
        labels = [t for t in range(begin + 1, end) if t >= ended]  # a label follows a token of the window
        if labels:
            expected.append((list(range(begin, labels[0])), labels))
        ended = end
        if end == tokens:
            break
    assert found == expected
