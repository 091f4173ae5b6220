"""Decoding in a state of fixed memory equals calls with the states that the model returns."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tost_lm.errors import ConfigError
from tost_lm.inference.decoding import Decoder, decoder
from tost_lm.mixers.delta.layer import DeltaMixer
from tost_lm.mixers.layer import ROOM_TOKENS
from tost_lm.mixers.registry import SPECS
from tost_lm.mixers.tssa.layer import TssaMixer
from tost_lm.model import LMState, TostLM
from tost_lm.testing import assert_as_accurate, assert_close

VOCAB = 40
CASES = [
    *({"pattern": letter, "positions": "none"} for letter in SPECS),
    {"pattern": "T", "tssa": {"denom_bias": "head"}, "positions": "none"},
    {"pattern": "A", "softmax": {"rope_theta": 0.0}},
    {"pattern": "A", "softmax": {"kv_heads": 1, "qk_norm": True}, "positions": "none"},
    {"pattern": "A", "softmax": {"window": 1}},
    {"pattern": "A", "softmax": {"window": ROOM_TOKENS + 7}},
    {"pattern": "A", "softmax": {"conv": True}},
    {"pattern": "TDA", "layers": 3, "softmax": {"window": 9, "conv": True}},
]


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def ids(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))


def state_after(model: TostLM, lengths: tuple[int, ...]) -> LMState:
    """The state after prompts of these lengths."""
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    state = model(ids(1, sum(lengths)), cu_seqlens=offsets).state
    assert state is not None
    return state


def by_calls(model: TostLM, state: LMState | None, tokens_BT: Tensor) -> Tensor:
    """The logits after each token, with a state of its own after each."""
    logits = []
    for token_B1 in tokens_BT.split(1, 1):
        output = model(token_B1, state=state)
        state = output.state
        logits.append(output.logits)
    return torch.cat(logits, 1)


def in_place(model: TostLM, state: LMState, tokens_BT: Tensor) -> Tensor:
    decode = decoder(model, state)
    assert isinstance(decode, Decoder)
    return torch.stack([decode(token_B).clone() for token_B in tokens_BT.unbind(1)], 1)


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("lengths", [(ROOM_TOKENS - 6,), (ROOM_TOKENS, 3, 19)], ids=str)
def test_logits_equal_those_of_calls(make_model, lengths: tuple[int, ...], settings: dict[str, Any]):
    """Across the end of the memory of keys, for prompts of one and of several lengths."""
    model, tokens_BT = make_model(max_positions=2 * ROOM_TOKENS, **settings), ids(len(lengths), 25)
    ours, theirs = (run(model, state_after(model, lengths), tokens_BT) for run in (in_place, by_calls))
    model.double()
    exact, truth = (run(model, state_after(model, lengths), tokens_BT) for run in (in_place, by_calls))
    assert_close(exact, truth, 1e-12, "logits")
    assert_as_accurate(ours, theirs, truth, "logits")


def test_many_tokens_equal_one_call(make_model):
    model, tokens_BT = make_model("TA", max_positions=2000).double(), ids(2, 3 * ROOM_TOKENS)
    logits_BTV = in_place(model, state_after(model, (1, 1)), tokens_BT)
    prompt_BT = torch.cat([ids(1, 2).T, tokens_BT], 1)
    assert_close(logits_BTV, model(prompt_BT).logits[:, 1:], 1e-10, "logits")


@pytest.mark.parametrize("pattern", SPECS)
def test_the_state_is_unchanged_and_may_be_of_inference_mode(make_model, pattern: str):
    model = make_model(pattern)
    with torch.inference_mode():
        state = state_after(model, (3, 5))
        kept = [x.clone() for layer in state.layers for x in layer]
        first = in_place(model, state, ids(2, 4))
        decode = decoder(model, state)
        decode(ids(2, 4)[:, 0])
    assert torch.equal(decode(ids(2, 4)[:, 1]), first[:, 1])
    assert all(map(torch.equal, kept, (x for layer in state.layers for x in layer)))


def test_another_mixer_decodes_by_calls(make_model, monkeypatch: pytest.MonkeyPatch):
    model, tokens_BT = make_model("TA"), ids(2, 4)
    state = state_after(model, (3, 5))
    monkeypatch.setattr(TssaMixer, "FIXED_STATE", False)
    decode = decoder(model, state)
    assert not isinstance(decode, Decoder)
    logits = torch.stack([decode(token_B) for token_B in tokens_BT.unbind(1)], 1)
    assert torch.equal(logits, by_calls(model, state, tokens_BT))


def test_a_state_that_changes_its_dtype_is_an_error(make_model, monkeypatch: pytest.MonkeyPatch):
    model = make_model("D")
    monkeypatch.setattr(DeltaMixer, "fixed_state", lambda mixer, state, _: type(state)(*(x.float() for x in state)))
    with pytest.raises(ValueError, match=r"DeltaState: a step changes torch.float32 \[.*\] to torch.float64 .*; set"):
        decoder(model, state_after(model, (3,)))(ids(1))


def test_positions_limit_the_length(make_model):
    model = make_model("TA", max_positions=6)
    decode = decoder(model, state_after(model, (5, 2)))
    decode(ids(2))
    with pytest.raises(ConfigError, match="7 tokens are more than the model's positions"):
        decode(ids(2))
