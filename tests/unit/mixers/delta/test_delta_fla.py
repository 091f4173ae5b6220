"""flash-linear-attention: its kernels where an interpreter runs them, its reference in chunks, and when it is used."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import normalize

from tost_lm.mixers.delta import fla
from tost_lm.mixers.delta.layer import DeltaMixer
from tost_lm.mixers.delta.operator import delta_rule
from tost_lm.ops.layout import LocalDocuments
from tost_lm.testing import assert_as_accurate

NAMES = ("query", "key", "value", "log_decay", "beta", "state")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is used where there is no GPU")
@pytest.mark.parametrize(("B", "T", "offsets"), [(2, 3, None), (1, 7, [0, 1, 5, 7])])
def test_the_recurrent_kernel_agrees_in_the_interpreter(B: int, T: int, offsets: list[int] | None):
    pytest.importorskip("fla")
    torch.manual_seed(0)
    local = LocalDocuments.of(None if offsets is None else torch.tensor(offsets), B, T, None)
    query, key = (normalize(torch.randn(B, T, 2, 6), dim=-1) for _ in range(2))
    inputs = query, key, torch.randn(B, T, 4, 5), -torch.rand(B, T, 4), 2 * torch.rand(B, T, 4)
    state = torch.randn(len(local.whole_lengths), 4, 6, 5).double()
    expected, expected_final = delta_rule(*inputs, local=local, initial_state=state, output_final_state=True)
    y, final = fla.delta_rule(*inputs, state, local)
    assert final.dtype == torch.float64
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(final, expected_final, rtol=1e-6, atol=1e-6)


def test_the_reference_of_fla_in_chunks_agrees():
    """Outputs, states and gradients. It computes in float32; its scale of queries is 1 / √K."""
    naive = pytest.importorskip("fla.ops.gated_delta_rule.naive")
    torch.manual_seed(0)
    local = LocalDocuments.of(None, 2, 100, None)
    query, key = (normalize(torch.randn(2, 100, 3, 16), dim=-1) for _ in range(2))
    inputs = query, key, torch.randn(2, 100, 3, 8), -torch.rand(2, 100, 3), torch.rand(2, 100, 3)
    inputs = *inputs, torch.randn(2, 3, 16, 8)
    weights = torch.randn(2, 100, 3, 8), torch.randn(2, 3, 16, 8)

    def results(rule: Any, dtype: torch.dtype, **settings: Any) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        y, final = rule(*leaves[:5], initial_state=leaves[5], output_final_state=True, **settings)
        gradients = torch.autograd.grad([y, final], leaves, [w.to(x) for w, x in zip(weights, (y, final), strict=True)])
        return [y, final.to(dtype), *gradients]

    ours, truth = (results(delta_rule, dtype, local=local) for dtype in (torch.float32, torch.float64))
    theirs = results(naive.naive_chunk_gated_delta_rule, torch.float32, scale=1.0)
    for name, mine, other, exact in zip(("y", "final", *NAMES), ours, theirs, truth, strict=True):
        assert_as_accurate(mine, other, exact, name)


def test_kernels_are_used_for_16_bit_values_on_gpus():
    pytest.importorskip("fla")

    def obstacle(device: str, dtype: torch.dtype, size: int) -> str | None:
        with FakeTensorMode():
            return fla.obstacle(*(torch.empty(1, 1, 1, size, device=device, dtype=dtype) for _ in range(2)))

    assert obstacle("cuda", torch.bfloat16, 256) is None
    assert obstacle("cuda", torch.float16, 128) is None
    assert obstacle("cpu", torch.bfloat16, 128) == "values are on cpu, but the kernels run on CUDA devices"
    assert obstacle("cuda", torch.float32, 128) == "values are torch.float32, but the kernels round products to TF32"
    assert obstacle("cuda", torch.bfloat16, 257) == "keys have 257 channels, but the kernels support up to 256"


def test_without_the_package_the_reason_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fla, "find_spec", lambda _: None)
    with FakeTensorMode():
        values = torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.bfloat16)
        assert fla.obstacle(values, values) == "the package fla-core is not installed"


@pytest.mark.parametrize(("capability", "triton", "miscompiles"), [
    ((9, 0), "3.6.0", True), ((9, 0), "3.7.0+git1", True), ((9, 0), "3.7.1", False), ((9, 0), "3.3.1", False),
    ((8, 0), "3.6.0", False),
])  # fmt: skip
def test_a_triton_that_miscompiles_the_kernels_is_refused(
    capability: tuple[int, int], triton: str, miscompiles: bool, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("fla")
    fla._miscompiled_on.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fla, "version", lambda package: triton)
    layer_on: Any = lambda device: SimpleNamespace(in_proj=SimpleNamespace(weight=SimpleNamespace(device=device)))
    on_a_cpu, missing = (DeltaMixer.missing_kernels(layer_on(torch.device(name))) for name in ("cpu", "cuda"))
    fla._miscompiled_on.cache_clear()
    assert on_a_cpu is None
    assert (missing is not None and "install torch>=2.12.1 or tilelang" in missing) == miscompiles
