"""A text in pieces is the text in one piece, holding a piece and the state; ids come in any form."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.model import LMState, ModelConfig, TostLM
from tost_lm.model.streaming import in_pieces, overlapping, read
from tost_lm.ops import TssaState

VOCAB = 50
UNLIMITED = {"positions": "sinusoidal", "denom_bias": "head"}


def build(**settings: Any) -> TostLM:
    """Wide weights, so that what came before matters."""
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
    """Nats in one piece, and the state before the last id."""
    output = model(tokens[None, :-1], labels=tokens[None, 1:])
    assert output.nats is not None
    assert output.state is not None
    return output.nats[0].double(), output.state


@pytest.mark.parametrize("piece_tokens", [1, 7, 40, 120, 121, 1000])
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"pattern": "T"}, torch.float32),
        ({"pattern": "T", "membership": "energy-mean"}, torch.float32),
        ({"pattern": "TTA", "layers": 3, "window": 9}, torch.float32),
        ({"pattern": "TA"}, torch.float64),
    ],
    ids=str,
)
def test_pieces_are_the_whole(settings: dict, dtype: torch.dtype, piece_tokens: int):
    model = build(**settings).to(dtype)
    tokens = ids(121)
    expected, state = whole(model, tokens)
    stream = model.stream(tokens, piece_tokens=piece_tokens)
    pieces = list(stream)
    assert [len(piece) for piece in pieces[:-1]] == [max(1, piece_tokens - 1), *[piece_tokens] * len(pieces)][
        : len(pieces) - 1
    ]
    nats = torch.cat(pieces)
    tight = dtype == torch.float64
    torch.testing.assert_close(nats, expected, rtol=0, atol=1e-11 if tight else 1e-4)
    ratio = (nats.mean() - expected.mean()).exp()
    assert abs(ratio - 1) < (1e-12 if tight else 1e-6)
    assert stream.last == tokens[-1]
    assert stream.state is not None
    assert stream.state.positions == state.positions == (120,)
    for layer, expected_layer in zip(stream.state.layers, state.layers, strict=True):
        for name, x, expected_x in zip(layer._fields, layer, expected_layer, strict=True):
            assert not isinstance(layer, TssaState) or name == "count" or x.dtype == torch.float64
            torch.testing.assert_close(x.double(), expected_x.double(), rtol=1e-11 if tight else 1e-4, atol=1e-4)


def test_sums_do_not_drift():
    """On top of so much, a float32 sum takes in nothing of a piece."""
    model, tokens, earlier = build(pattern="T"), ids(61), 1e10
    _, state = whole(model, tokens[:2])
    heavy = [TssaState(torch.full_like(layer[0], earlier), *layer[1:]) for layer in state.layers]
    added = {}
    for dtype in (torch.float32, torch.float64):
        stream = model.to(dtype).stream(tokens, LMState(tuple(heavy), (1,)), piece_tokens=3)
        assert sum(len(nats) for nats in stream) == 60
        assert stream.state is not None
        added[dtype] = stream.state.layers[0][0] - earlier
    assert added[torch.float32].min() > 1
    torch.testing.assert_close(added[torch.float32], added[torch.float64], rtol=1e-4, atol=0)


@pytest.mark.parametrize("pattern", ["T", "TA"])
def test_a_stream_goes_on_from_a_stream_and_so_does_a_call(pattern: str):
    model = build(pattern=pattern, window=5)
    tokens = ids(60)
    expected, _ = whole(model, tokens)
    first = model.stream(tokens[:25], piece_tokens=10)
    began = torch.cat(list(first))
    assert first.last is not None
    second = model.stream(chain([first.last], tokens[25:]), first.state, piece_tokens=10)
    torch.testing.assert_close(torch.cat([began, *second]), expected, rtol=0, atol=1e-4)
    for here in (first, second):
        logits = model(torch.tensor([[here.last]]), state=here.state).logits  # as in a notebook, gradients on
        end = 25 if here is first else 60
        torch.testing.assert_close(logits[0, 0], model(tokens[None, :end]).logits[0, -1], rtol=1e-4, atol=1e-3)


def forms_of(tokens: Tensor) -> Iterator[Any]:
    yield tokens
    yield tokens.tolist()
    yield iter(tokens)
    yield tokens.numpy().astype(np.uint16)
    yield (part for part in tokens.split(7))
    yield (part.numpy().astype(np.uint32) for part in tokens.split([0, 50, 1, 0, len(tokens) - 51]))
    yield chain([int(tokens[0])], [tokens[1:].numpy()])


def test_ids_come_in_any_form():
    tokens = ids(101)
    for form in forms_of(tokens):
        pieces = list(in_pieces(form, 20))
        assert [tuple(piece.shape) for piece in pieces] == [(1, 20)] * 5 + [(1, 1)]
        assert torch.equal(torch.cat(pieces, 1), tokens[None])


@pytest.mark.parametrize("tokens", [torch.ones(2, 3, dtype=torch.int64), [0.5], "abc", [torch.ones(2)]])
def test_what_is_no_ids_is_refused(tokens: Any):
    with pytest.raises(ValueError, match="ids must be whole numbers in one dimension"):
        list(in_pieces(tokens, 4))


def test_pieces_hold_a_token_at_least():
    with pytest.raises(ValueError, match="pieces of 0 tokens"):
        build().stream([1, 2], piece_tokens=0)


def test_ids_are_taken_as_they_are_needed():
    taken: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            taken.append(1)
            yield 1

    stream = build().stream(endless(), piece_tokens=10)
    assert len(next(stream)) == 9
    assert len(taken) == 10
    assert len(next(stream)) == 10
    assert len(taken) == 20


def test_of_no_ids_or_one_there_are_no_nats():
    empty, single = build().stream([]), build().stream([3])
    assert list(empty) == list(single) == []
    assert (empty.last, empty.state) == (None, None)
    assert (single.last, single.state) == (3, None)


def test_the_positions_are_a_limit():
    model = build(positions="learned", max_positions=16)
    assert sum(len(nats) for nats in model.stream(ids(17), piece_tokens=5)) == 16
    stream = model.stream(ids(1000), piece_tokens=5)
    assert [len(next(stream)) for _ in range(3)] == [4, 5, 5]
    with pytest.raises(ConfigError, match=r"19 tokens .*model\.max_positions = 16"):
        next(stream)
    assert stream.state is not None
    assert (stream.last, stream.state.positions) == (ids(1000)[14], (14,))


@pytest.mark.parametrize("sizes", [[40], [1, 38, 1], [13, 27]])
def test_a_prompt_in_pieces_ends_as_in_one(sizes: list[int]):
    model = build(pattern="TA", window=5)
    tokens_BT = ids(80).view(2, 40)
    output, expected = read(model, tokens_BT.split(sizes, 1)), model(tokens_BT)
    assert output.logits.shape == (2, 1, VOCAB)
    torch.testing.assert_close(output.logits[:, 0], expected.logits[:, -1], rtol=1e-4, atol=1e-3)
    assert output.state is not None
    assert output.state.positions == (40, 40)


def test_nothing_to_read_is_refused():
    with pytest.raises(ValueError, match="no tokens to read"):
        read(build(), [])


def test_pieces_overlap_by_a_token():
    pieces = [piece.tolist() for piece in overlapping(torch.arange(6)[None].split([1, 3, 2], 1))]
    assert pieces == [[[0]], [[0, 1, 2, 3]], [[3, 4, 5]]]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else [made]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return made


@pytest.mark.parametrize("pattern", ["T", "TA"])
def test_memory_does_not_grow_with_the_text(pattern: str):
    model = build(pattern=pattern, window=8)
    largest, states = [], []
    for tokens in (64, 8 * 64):
        stream = model.stream((int(i) for i in ids(tokens)), piece_tokens=32)
        with Largest() as made:
            assert sum(len(nats) for nats in stream) == tokens - 1
        largest.append(made.numel)
        assert stream.state is not None
        states.append(sum(x.numel() for layer in stream.state.layers for x in layer))
    assert largest[0] == largest[1]
    assert states[0] == states[1]


def test_a_prompt_is_read_without_its_logits():
    model = build(pattern="TA", window=8, vocab_size=5000, width=8)
    with Largest() as made:
        read(model, in_pieces(ids(400), 64))
    assert made.numel < 64 * 5000
