"""Documents, chunks and rows of different lengths: whatever the way a document is read, in float64 it is the same."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.model import ModelConfig, TostLM

pytestmark = pytest.mark.quick

LENGTHS = [5, 1, 17, 9]
VOCAB = 19
KINDS = {
    "published": {"pattern": "T"},
    "rotary, window": {"pattern": "TA", "positions": "none", "softmax": {"window": 4}},
    "delta": {"pattern": "DA", "positions": "none", "tssa": {"denom_bias": "head"}},
}
"""Layers alone, in all forms, are those of tests/unit/mixers/test_layers_conform.py."""
all_kinds = pytest.mark.parametrize("kind", KINDS)


def drawn_model(kind: str) -> TostLM:
    """Weights wide enough that every part shows in the logits."""
    torch.manual_seed(0)
    settings = {"layers": 2, "heads": 2, "width": 8, "vocab_size": VOCAB, "max_positions": 40, "layer_scale": 1.0}
    model = TostLM(validate(ModelConfig, {**settings, **KINDS[kind]}, "test")).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def drawn_documents(lengths: list[int] = LENGTHS) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(VOCAB, (length,)) for length in lengths]


def packed(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens [1, T] and cu_seqlens."""
    offsets = [0, *accumulate(map(len, documents))]
    return torch.cat(documents)[None], torch.tensor(offsets, dtype=torch.int32)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert_close(ours, theirs, rtol=0, atol=1e-12 * max([1.0, *theirs.detach().abs().flatten().tolist()]))


def logits_one_by_one(model: TostLM, documents: list[Tensor]) -> Tensor:
    return torch.cat([model(document[None]).logits[0] for document in documents])


@all_kinds
def test_packed_documents_are_separate_documents_with_every_gradient(kind: str):
    model, documents = drawn_model(kind), drawn_documents()
    tokens, cu_seqlens = packed(documents)
    output = model(tokens, cu_seqlens=cu_seqlens)
    expected = logits_one_by_one(model, documents)
    assert_same(output.logits[0], expected)
    assert output.state.positions == tuple(LENGTHS)
    pull = torch.randn_like(expected)
    parameters = dict(model.named_parameters())
    ours, theirs = (
        torch.autograd.grad((logits * pull).sum(), list(parameters.values()), materialize_grads=True)
        for logits in (output.logits[0], expected)
    )
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        assert_same(a, b)
        assert b.any(), name


@all_kinds
def test_rows_of_different_lengths_are_decoded_together(kind: str):
    model, documents = drawn_model(kind), drawn_documents()
    tokens, cu_seqlens = packed(documents)
    state = model(tokens, cu_seqlens=cu_seqlens).state
    more = torch.randint(VOCAB, (len(documents), 12))
    logits = []
    for part in more.split([1, 3, 1, 7], 1):
        output = model(part, state=state)
        logits.append(output.logits)
        state = output.state
    assert state.positions == tuple(length + 12 for length in LENGTHS)
    for n, document in enumerate(documents):
        expected = model(torch.cat([document, more[n]])[None]).logits[0, len(document) :]
        assert_same(torch.cat(logits, 1)[n], expected)


def test_cu_seqlens_are_read_once_a_call():
    model = drawn_model("rotary, window")
    tokens, cu_seqlens = packed(drawn_documents())
    reads: list[int] = []

    class Counted(Tensor):
        def tolist(self) -> list[int]:
            reads.append(1)
            return super().tolist()

    counted = cu_seqlens.as_subclass(Counted)
    model(tokens, cu_seqlens=counted)
    assert len(reads) == 1


def test_what_does_not_fit_is_named():
    model = drawn_model("rotary, window")
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    for wrong in ([0, 5], [1, 6], [0, 3, 3, 6], [0, 4, 2, 6]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T"):
            model(tokens, cu_seqlens=torch.tensor(wrong, dtype=torch.int32))
    with pytest.raises(ValueError, match="cu_seqlens must"):
        model(tokens.view(2, 3), cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="B, T ≥ 1"):
        model(tokens[:0])
    with pytest.raises(ValueError, match="the state is of another model"):
        model(tokens, state=drawn_model("delta")(tokens).state)
    with pytest.raises(ValueError, match="state holds 1 rows, the input 2"):
        model(tokens.view(2, 3), state=model(tokens).state)


def test_only_what_is_sized_by_positions_is_limited_by_them():
    limits = {kind: drawn_model(kind).config.position_limit for kind in KINDS}
    assert limits == {"published": 40, "rotary, window": 40, "delta": None}  # by positions, by denom_bias, by nothing
    for kind, limit in limits.items():
        model = drawn_model(kind)
        tokens, cu_seqlens = packed(drawn_documents([40, 41]))
        if limit is None:
            assert model(tokens).logits.isfinite().all()
        else:
            model(tokens[:, :80], cu_seqlens=torch.tensor([0, 40, 80], dtype=torch.int32))  # each document has its own
            with pytest.raises(ConfigError, match=r"41 tokens .*max_positions = 40"):
                model(tokens, cu_seqlens=cu_seqlens)
