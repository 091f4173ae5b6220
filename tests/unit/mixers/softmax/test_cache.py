"""Decoding with full attention: the cache grows in place, whatever the rows' lengths, and states stay independent."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tost_lm.config import validate
from tost_lm.inference.decoding import decoder
from tost_lm.mixers.layer import ROOM_TOKENS
from tost_lm.mixers.softmax.cache import KeyValueState, memory_of
from tost_lm.model import LMState, ModelConfig, TostLM

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


def caches(state: LMState | None) -> list[KeyValueState]:
    assert state is not None
    assert all(memory_of(layer) is not None for layer in state.layers)
    return list(state.layers)


def test_tokens_are_added_in_place_until_the_room_is_full(model: TostLM):
    tokens_BT, states, logits = ids(2, 2 * ROOM_TOKENS + 4), [], []
    for token_B1 in tokens_BT.split(1, 1):
        output = model(token_B1, state=states[-1] if states else None)
        states.append(output.state)
        logits.append(output.logits)
    assert_close(torch.cat(logits, 1), model(tokens_BT).logits, rtol=0, atol=1e-10)
    places = [caches(state)[0].key.data_ptr() for state in states]
    assert [n for n in range(1, len(places)) if places[n] != places[n - 1]] == [ROOM_TOKENS + 1, 2 * ROOM_TOKENS + 2]


class LargestCopy(TorchDispatchMode):
    """The most numbers that an operation writes, views aside, and `scatter_`, which returns all that it writes to."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.scatter_.src:
            tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.numbers = max([self.numbers, *(x.numel() for x in tensors)])
        return result


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("lengths", [(2000, 2000), (2000, 700)])
def test_a_token_copies_no_keys(model: TostLM, lengths: tuple[int, ...], in_place: bool):
    """The largest results are a mask and, in torch's kernel of attention, the scores of one token."""
    output = model(ids(1, sum(lengths)), cu_seqlens=torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32))
    state = model(ids(2, 1), state=output.state).state  # moves the keys into memory with room
    keys = caches(state)[0].key.numel()
    decode = decoder(model, state)
    with LargestCopy() as copies:
        decode(ids(2, 1)[:, 0]) if in_place else model(ids(2, 1), state=state)
    assert copies.numbers < keys / 4


def test_states_of_one_memory_are_independent(model: TostLM):
    prompt, first, second = ids(2, 5), ids(2, 3), (ids(2, 3) + 1) % VOCAB
    state = model(prompt).state
    kept = [x.clone() for layer in caches(state) for x in layer]
    after = [model(more, state=state) for more in (first, second)]
    again = [model(ids(2, 1), state=output.state).logits for output in after]
    for more, output, logits in zip((first, second), after, again, strict=True):
        whole = model(torch.cat([prompt, more, ids(2, 1)], 1)).logits
        assert_close(output.logits, whole[:, 5:8], rtol=0, atol=1e-10)
        assert_close(logits, whole[:, 8:], rtol=0, atol=1e-10)
    for x, y in zip(kept, (x for layer in caches(state) for x in layer), strict=True):
        assert torch.equal(x, y)


def test_gradients_flow_to_the_state(model: TostLM):
    """With gradients, the state is no memory that later tokens write to."""
    prompt, more = ids(1, 5), ids(1, 2)
    with torch.enable_grad():
        state = model(prompt).state
        loss = model(more, state=state).logits.square().sum()
        whole = model(torch.cat([prompt, more], 1)).logits[:, 5:].square().sum()
        for ours, theirs in zip(*(torch.autograd.grad(x, [*model.parameters()]) for x in (loss, whole)), strict=True):
            assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert state is not None
    assert memory_of(state.layers[0]) is None
