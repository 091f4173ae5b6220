"""Decoding with full attention: no token copies the keys, whatever the rows' lengths; and states that calls return."""

from collections.abc import Iterator

import pytest
import torch
from largest import Largest
from torch import Tensor
from torch.testing import assert_close

from tost_lm.config import validate
from tost_lm.inference.decoding import decoder
from tost_lm.mixers.softmax.cache import KeyValueSlots, KeyValueState
from tost_lm.model import ModelConfig, TostLM

VOCAB, LAYERS = 50, 2


@pytest.fixture
def model() -> TostLM:
    torch.manual_seed(0)
    tree = {
        "pattern": "A", "layers": LAYERS, "heads": 4, "width": 32, "vocab_size": VOCAB, "layer_scale": 1.0,
        "positions": "none", "softmax": {"kv_heads": 2},
    }  # fmt: skip
    return TostLM(validate(ModelConfig, tree, "test")).double().eval()


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def ids(B: int, T: int) -> Tensor:
    return torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("lengths", [(2000, 2000), (2000, 700)])
def test_a_token_copies_no_keys(model: TostLM, lengths: tuple[int, ...]):
    """The largest results are a mask and, in torch's kernel of attention, the scores of one token."""
    output = model(ids(1, sum(lengths)), cu_seqlens=torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32))
    assert output.state is not None
    keys = output.state.layers[0].key.numel()
    decode = decoder(model, output.state)
    with Largest() as copies:
        decode(ids(2, 1)[:, 0])
    assert copies.numbers < keys / 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_takes_its_slot_and_leaves_the_others(dtype: torch.dtype):
    before, kv = (KeyValueState(*torch.randn(2, 2, 2, T, 4, dtype=dtype)) for T in (5, 1))
    slots, kept = (KeyValueSlots.of(before, [5, 3], 8) for _ in range(2))
    slots.add(torch.tensor([[5], [3]]), (kv.key, kv.value))
    for x, old, new in zip(slots, kept, kv, strict=True):
        old[[0, 1], :, [5, 3]] = new[:, :, 0]
        assert torch.equal(x, old)


def test_two_calls_that_continue_one_state_are_independent(model: TostLM):
    prompt, first, second = ids(2, 5), ids(2, 3), (ids(2, 3) + 1) % VOCAB
    state = model(prompt).state
    assert state is not None
    kept = [x.clone() for layer in state.layers for x in layer]
    after = [model(more, state=state) for more in (first, second)]
    again = [model(ids(2, 1), state=output.state).logits for output in after]
    for more, output, logits in zip((first, second), after, again, strict=True):
        whole = model(torch.cat([prompt, more, ids(2, 1)], 1)).logits
        assert_close(output.logits, whole[:, 5:8], rtol=0, atol=1e-10)
        assert_close(logits, whole[:, 8:], rtol=0, atol=1e-10)
    for x, y in zip(kept, (x for layer in state.layers for x in layer), strict=True):
        assert torch.equal(x, y)


def test_convolved_keys_begin_as_those_of_the_token_before(model: TostLM):
    tree = model.config.model_dump() | {"softmax": {"kv_heads": 2, "rope_theta": 0.0, "gate": True}}
    plain, convolved = (
        TostLM(validate(ModelConfig, {**tree, "softmax": {**tree["softmax"], "conv": conv}}, "test")).double()
        for conv in (False, True)
    )
    convolved.load_state_dict(plain.state_dict(), strict=False)
    tokens_BT = ids(2, 16)
    (of_plain, *_), (of_convolved, *_) = (one(tokens_BT).state.layers for one in (plain, convolved))
    assert_close(of_convolved.attention.key[:, :, 1:], of_plain.key[:, :, :-1])
    assert not of_convolved.attention.key[:, :, 0].any()
    assert_close(of_convolved.attention.value, of_plain.value)
