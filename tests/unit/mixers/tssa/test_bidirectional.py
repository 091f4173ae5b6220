"""Bidirectional TSSA: the formulas of the paper, the order of tokens, and precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import normalize

from experiments.vision.classifier import BidirectionalTssa, tssa
from tost_lm.config import validate
from tost_lm.model import ModelConfig
from tost_lm.ops.positions import SequenceInfo
from tost_lm.testing import assert_close

pytestmark = pytest.mark.quick


def as_published(w_BTHD: Tensor, temp_H: Tensor) -> Tensor:
    """The operator in the order of operations of the released vision code, written from the paper's equations."""
    w_BHTD = w_BTHD.transpose(1, 2)
    pi_BHT = ((normalize(w_BHTD, dim=2) ** 2).sum(-1) * temp_H[:, None]).softmax(1)
    weights_BHT = pi_BHT / (pi_BHT.sum(-1, keepdim=True) + 1e-8)
    moment_BHD = torch.stack([(weights_BHT[..., None] * w_BHTD**2)[:, :, t] for t in range(w_BTHD.shape[1])]).sum(0)
    return (-(w_BHTD * pi_BHT[..., None]) / (1 + moment_BHD[:, :, None])).transpose(1, 2)


def drawn(seed: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in (shape, shape[2])
    ]


@given(st.integers(0, 99), st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_equals_the_paper(seed: int, B: int, T: int, H: int, D: int):
    leaves = drawn(seed, B, T, H, D)
    ours, theirs = tssa(*leaves), as_published(*leaves)
    assert_close(ours, theirs, 1e-13, "y")
    dy = torch.randn_like(ours)
    for name, a, b in zip(("dw", "d_temp"), *(torch.autograd.grad(y, leaves, dy) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_costs_one_rounding(dtype: torch.dtype):
    w, temp = (x.detach().to(dtype) for x in drawn(4, 1, 64, 3, 16))
    truth = tssa(w.double(), temp.double())
    error, rounding = ((x.double() - truth).norm() for x in (tssa(w, temp), truth.to(dtype)))
    assert error <= 1.5 * rounding


def test_autocast_does_not_touch_the_statistics():
    shape = {"layers": 1, "heads": 2, "width": 16, "positions": "none", "tssa": {"denom_bias": "none"}, "bias": False}
    layer = BidirectionalTssa(validate(ModelConfig, shape, "test").shape_of("T"))
    layer.out_proj = nn.Identity()
    x = torch.randn(1, 40, 16)
    info = SequenceInfo.of(x[..., 0], None, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = layer(x, None, info)
        w = layer.in_proj(x).unflatten(-1, (2, -1))
    assert torch.equal(y, tssa(w, layer.temp).flatten(-2))
