"""Rotary embeddings against their formula, far out as well."""

import math

import pytest
import torch
from torch.testing import assert_close

from tost_lm.ops.positions import apply_rotary, rotary_cos_sin
from tost_lm.ops.rotary import Rotary

FAR = 1_000_003


def test_rotary_embedding_is_a_product_of_complex_numbers():
    position = torch.tensor([0, 1, 2, 900, FAR])
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    turned = apply_rotary(x, rotary_cos_sin(position, Rotary(8, 10000.0), x.dtype))
    for n, p in enumerate(position.tolist()):
        for i in range(4):
            turn = complex(math.cos(p * 10000 ** (-i / 4)), math.sin(p * 10000 ** (-i / 4)))
            expected = torch.complex(x[:, :, n, i], x[:, :, n, i + 4]) * turn
            ours = torch.complex(turned[:, :, n, i], turned[:, :, n, i + 4])
            assert_close(ours, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embedding_is_exact_far_out_in_low_precision(dtype: torch.dtype):
    position = torch.arange(FAR, FAR + 20)
    x = torch.randn(1, 2, 20, 16).to(dtype)
    turned = apply_rotary(x, rotary_cos_sin(position, Rotary(16, 10000.0), dtype))
    exact = apply_rotary(x.double(), rotary_cos_sin(position, Rotary(16, 10000.0), torch.float64))
    assert turned.dtype == dtype
    assert_close(turned.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
