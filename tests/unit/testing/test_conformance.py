"""The conformance harness: torch's attention passes it, and it finds every planted error by its kind."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from toy_mixer import REACH, Mutation, toy_adapter

from tost_lm.testing.conformance import EQUALITIES, MixerAdapter, check

LATER, STATE, SINGLE, DOCUMENTS, TILES, RANKS, SLOPES, WINDOW, NAN = EQUALITIES
FOUND_BY: dict[Mutation, set[str]] = {
    "later token visible": {LATER, STATE, SINGLE, TILES, NAN},
    "sum leaks across documents": {DOCUMENTS, TILES, NAN},
    "convolution reaches across documents": {DOCUMENTS, TILES, NAN},
    "convolution starts again at a cut": {STATE, SINGLE, TILES},
    "window of the state too short": {STATE, SINGLE, TILES},
    "window too long": {WINDOW},
    "final state detached": {STATE, SINGLE, TILES, SLOPES},
    "gradient of the initial state too large": {STATE, SINGLE, TILES, SLOPES},
    "gradient of the decay too large": {SLOPES},
    "NaN spread by a triangular product": {NAN},
}
ON_RANKS = {"a rank ignored", "gradient to other ranks ignored"}
"""Found in tests/multiprocess/test_conformance_on_ranks.py."""


def test_every_mutation_is_found_somewhere():
    assert set(get_args(Mutation)) == FOUND_BY.keys() | ON_RANKS


def test_the_toy_mixer_conforms():
    report = check(toy_adapter(), seed=1)
    report.require()
    assert report.with_result("not offered") == [RANKS, WINDOW]


@pytest.mark.parametrize("mutation", FOUND_BY)
def test_a_planted_error_is_found_by_its_kind(mutation: Mutation):
    windowed = mutation == "window too long"
    report = check(toy_adapter(mutation, decays=not windowed, window=REACH if windowed else None), tokens=16)
    assert set(report.with_result("fails")) == FOUND_BY[mutation]
    with pytest.raises(AssertionError, match=r"toy:\n.*: .*\("):
        report.require()


def test_containing_a_nan_may_be_reported_without_being_required():
    report = check(toy_adapter("NaN spread by a triangular product", contains_nan=False), tokens=16)
    assert report.with_result("fails") == [NAN]
    report.require()


@pytest.mark.parametrize(("window", "holds"), [(REACH - 1, False), (REACH, True), (REACH + 1, False)])
def test_a_window_has_its_exact_length(window: int, holds: bool):
    report = check(toy_adapter(decays=False, window=window), tokens=16)
    assert report.with_result("fails") == ([] if holds else [WINDOW])


def test_a_call_that_raises_fails_with_its_message():
    def no_documents(mixer: nn.Module, x_BTC: Tensor, *, cu_seqlens: Tensor | None, **_: Any) -> tuple[Tensor, None]:
        if cu_seqlens is not None:
            raise NotImplementedError("packed documents\nare not supported")
        return mixer(x_BTC), None

    adapter = MixerAdapter("linear", 4, partial(nn.Linear, 4, 4), no_documents, has_state=False)
    line = check(adapter).equalities[EQUALITIES.index(DOCUMENTS)]
    assert (line.result, line.reason) == ("fails", "NotImplementedError: are not supported")
    assert check(replace(adapter, has_documents=False)).with_result("fails") == []


def test_a_report_is_a_table():
    lines = str(check(toy_adapter("NaN spread by a triangular product"))).splitlines()
    assert [line.count("|") for line in lines] == [6] * (2 + len(EQUALITIES))
    assert lines[-1].startswith(f"| {NAN} | fails | inf | 1e-10 | outputs with a NaN at token")


def attention_with_cache(
    mixer: nn.Module, x_BTC: Tensor, *, state: tuple[Tensor, Tensor] | None, **_: Any
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """torch's attention of 2 heads, with the keys and values of earlier tokens as state."""
    q, k, v = mixer(x_BTC).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    if state is not None:
        k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    y_BHTD = scaled_dot_product_attention(q, k, v, attn_mask=visible)
    return y_BHTD.transpose(1, 2).flatten(-2), (k, v)


def attention_of_documents(
    mixer: nn.Module, x_BTC: Tensor, *, cu_seqlens: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """torch's attention of 2 heads, with its causal kernel or a mask of documents."""
    q, k, v = mixer(x_BTC).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    visible = None
    if cu_seqlens is not None:
        lengths = [end - start for start, end in pairwise(cu_seqlens.tolist())]
        visible = torch.block_diag(*(torch.ones(n, n) for n in lengths)).tril().bool()
    y_BHTD = scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None)
    return y_BHTD.transpose(1, 2).flatten(-2), None


@pytest.mark.parametrize(
    ("call", "offered"),
    [(attention_with_cache, {"has_documents": False}), (attention_of_documents, {"has_state": False})],
)
def test_attention_of_torch_conforms_but_a_nan_reaches_earlier_tokens(call: Any, offered: dict[str, Any]):
    report = check(MixerAdapter("SDPA", 8, partial(nn.Linear, 8, 24), call, **offered))
    assert report.with_result("fails") == [NAN]
    missing = [RANKS, WINDOW, *([DOCUMENTS] if "has_documents" in offered else [STATE, SINGLE, TILES])]
    assert sorted(report.with_result("not offered")) == sorted(missing)
