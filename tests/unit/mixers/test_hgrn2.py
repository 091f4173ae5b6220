"""HGRN2, a plugin of experiments, conforms, and its chunks are the recurrence."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from forked import CHECKOUT
from layer_forms import config_of
from torch import Tensor

from tost_lm.mixers.plugins import run_plugin
from tost_lm.mixers.registry import SPECS, mixer_class
from tost_lm.testing.conformance import EQUALITIES, check

RANKS, WINDOW, NAN = EQUALITIES[5], *EQUALITIES[7:]


@pytest.fixture(autouse=True)
def hgrn2() -> Iterator[Any]:
    """The module."""
    run_plugin(CHECKOUT / "experiments/hgrn2.py")
    yield sys.modules[mixer_class("H").__module__]
    del SPECS["H"]


def test_it_conforms():
    report = check("H", config_of("H", {}), tokens=40)
    report.require()
    assert (report.with_result("fails"), report.with_result("not offered")) == ([NAN], [RANKS, WINDOW])


def test_chunks_are_the_recurrence(hgrn2: Any):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    lengths, (query, key, value, gate), before = (37, 1, 16), draw(4, 54, 2, 5), draw(3, 2, 5, 5)
    leaves = [x.requires_grad_() for x in (query, key, value, (10 * gate).sigmoid().log(), before)]

    def recurrence(tokens: list[Tensor], lengths: tuple[int, ...], before: Tensor) -> tuple[Tensor, Tensor]:
        outputs, states = [], []
        for state, *of_document in zip(before, *(x.split(lengths) for x in tokens), strict=True):
            for q, k, v, log_f in zip(*of_document, strict=True):
                state = log_f.exp()[..., None] * state + k[..., None] * v[:, None]
                outputs.append((q[..., None] * state).sum(-2))
            states.append(state)
        return torch.stack(outputs), torch.stack(states)

    results = []
    for scan in (hgrn2.scan, recurrence):
        outputs = scan(leaves[:4], lengths, leaves[4])
        weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, weights)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)
