"""A stream reads a text in tiles with the results of one call, in bounded memory; ids come in any form."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from largest import Largest
from other_forms import other_forms
from torch import Tensor

from tost_lm.config import validate
from tost_lm.mixers.tssa.statistics import TssaState
from tost_lm.model import LMState, ModelConfig, TostLM
from tost_lm.model.streaming import in_tiles, prefill
from tost_lm.testing import assert_as_accurate

VOCAB = 50
UNLIMITED = {"positions": "none", "tssa": {"denom_bias": "head"}}


def build(**settings: Any) -> TostLM:
    """A model with large weights, so that earlier tokens matter."""
    small = {"layers": 2, "heads": 4, "width": 32, "vocab_size": VOCAB, "layer_scale": 1.0, **UNLIMITED}
    torch.manual_seed(0)
    model = TostLM(validate(ModelConfig, {**small, **settings}, "test"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(20 if "blocks" in name else 10)
    return model.eval()


def ids(tokens: int) -> Tensor:
    return torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def whole(model: TostLM, tokens: Tensor) -> tuple[Tensor, LMState]:
    """Nats in one call, and the state before the last id."""
    output = model(tokens[None, :-1], labels=tokens[None, 1:])
    assert output.nats is not None
    assert output.state is not None
    return output.nats[0], output.state


@pytest.mark.quick
@pytest.mark.parametrize("tile_tokens", [1, 7, 40, 120, 121, 1000])
@pytest.mark.parametrize(
    "settings",
    [
        {"pattern": "T"},
        {"pattern": "TTA", "layers": 3, "softmax": {"window": 9}},
        {"pattern": "TA"},
        {"pattern": "A", **other_forms(window=9), "heads": 4},
        {"pattern": "D"},
    ],
    ids=str,
)
def test_tiles_are_as_accurate_as_one_call(settings: dict, tile_tokens: int):
    model, tokens = build(**settings), ids(121)
    stream = model.stream(tokens, tile_tokens=tile_tokens)
    tiles = list(stream)
    assert stream.last == tokens[-1]
    assert {len(tile) for tile in tiles[:-1]} <= {tile_tokens}
    theirs, state = whole(model, tokens)
    truth, true_state = whole(model.double(), tokens)
    assert_as_accurate(torch.cat(tiles).float(), theirs, truth, "nats")
    assert stream.state is not None
    assert stream.state.positions == state.positions == (120,)
    for layers in zip(stream.state.layers, state.layers, true_state.layers, strict=True):
        for name, x, reference, exact in zip(layers[0]._fields, *layers, strict=True):
            if x.is_floating_point():
                assert not isinstance(layers[0], TssaState) or x.dtype == torch.float64
                assert_as_accurate(x.float(), reference, exact, name)
            else:
                assert torch.equal(x, exact)


@pytest.mark.parametrize("pattern", ["T", "TA", "D"])
def test_the_state_of_a_stream_continues_in_a_stream_or_a_call(pattern: str):
    model, tokens = build(pattern=pattern, softmax={"window": 5}), ids(60)
    exact = build(pattern=pattern, softmax={"window": 5}).double()
    first = model.stream(tokens[:25], tile_tokens=10)
    start = list(first)
    assert first.last is not None
    second = model.stream(chain([first.last], tokens[25:]), first.state, tile_tokens=10)
    assert_as_accurate(torch.cat([*start, *second]).float(), whole(model, tokens)[0], whole(exact, tokens)[0])
    for stream, end in ((first, 25), (second, 60)):
        logits = model(torch.tensor([[stream.last]]), state=stream.state).logits  # with gradients, as in a notebook
        one_call, truth = (each(tokens[None, :end]).logits[:, -1:] for each in (model, exact))
        assert_as_accurate(logits, one_call, truth)


@pytest.mark.parametrize("tokens", [torch.ones(2, 3, dtype=torch.int64), [0.5], "abc", [torch.ones(2)]])
def test_invalid_ids_are_refused(tokens: Any):
    with pytest.raises(ValueError, match="ids must be integers in one dimension"):
        list(in_tiles(tokens, 4))


def test_ids_are_read_as_they_are_needed():
    read_so_far: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            read_so_far.append(1)
            yield 1

    stream = build().stream(endless(), tile_tokens=10)
    assert len(next(stream)) == 10
    assert len(read_so_far) == 11
    assert len(next(stream)) == 10
    assert len(read_so_far) == 21


def test_fewer_than_two_ids_have_no_nats():
    empty, single = build().stream([]), build().stream([3])
    assert list(empty) == list(single) == []
    assert (empty.last, empty.state) == (None, None)
    assert (single.last, single.state) == (3, None)


@pytest.mark.parametrize("sizes", [[40], [1, 38, 1], [13, 27]])
def test_a_prompt_in_tiles_is_as_accurate_as_in_one_call(sizes: list[int]):
    model = build(pattern="TA", softmax={"window": 5})
    tokens_BT = ids(80).view(2, 40)
    output, one_call = prefill(model, tokens_BT.split(sizes, 1)), model(tokens_BT).logits[:, -1:]
    assert output.logits.shape == (2, 1, VOCAB)
    assert_as_accurate(output.logits, one_call, model.double()(tokens_BT).logits[:, -1:])
    assert output.state is not None
    assert output.state.positions == (40, 40)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="no tokens to read"):
        prefill(build(), [])


@pytest.mark.parametrize("pattern", ["T", "TA", "D"])
def test_memory_does_not_grow_with_the_text(pattern: str):
    model = build(pattern=pattern, softmax={"window": 8})
    largest, states = [], []
    for tokens in (64, 8 * 64):
        stream = model.stream((int(i) for i in ids(tokens)), tile_tokens=32)
        with Largest() as made:
            assert sum(len(nats) for nats in stream) == tokens - 1
        largest.append(made.numbers)
        assert stream.state is not None
        states.append(sum(x.numel() for layer in stream.state.layers for x in layer))
    assert largest[0] == largest[1]
    assert states[0] == states[1]


def test_only_the_last_token_of_a_prompt_gets_logits():
    model = build(pattern="TA", softmax={"window": 8}, vocab_size=5000, width=8)
    with Largest() as made:
        prefill(model, in_tiles(ids(400), 64))
    assert made.numbers < 64 * 5000
