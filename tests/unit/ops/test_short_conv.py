"""The short convolution: as written, as torch's, as the kernel of flash-linear-attention, and over documents.

The kernel runs in Triton's interpreter.
"""

from itertools import pairwise

import pytest
import torch
from fla_core import fla_core
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import conv1d, silu

from tost_lm.ops import short_conv as short_conv_module
from tost_lm.ops.backends import choose
from tost_lm.ops.layout import LocalDocuments
from tost_lm.ops.short_conv import short_conv
from tost_lm.testing import assert_as_accurate

pytestmark = pytest.mark.quick


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad((y * weights).sum(), inputs))


def convolved(x_TC: Tensor, weight_CK: Tensor) -> Tensor:
    """The convolution as it is written."""
    T, K = len(x_TC), weight_CK.shape[1]
    zeros = x_TC.new_zeros(K - 1, x_TC.shape[1])
    padded = torch.cat([zeros, x_TC])
    return torch.stack([(weight_CK.T * padded[t : t + K]).sum(0) for t in range(T)])


def by_torch(x_BMC: Tensor, weight_CK: Tensor, activated: bool) -> Tensor:
    y_BTC = conv1d(x_BMC.mT, weight_CK[:, None], groups=len(weight_CK)).mT
    return silu(y_BTC) if activated else y_BTC


@pytest.mark.parametrize("activated", [False, True])
def test_several_rows_at_a_time_are_as_accurate_as_torch(activated: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(short_conv_module, "CPU_ELEMENTS", 8 * 8)
    exact = [torch.randn(2, 23, 4).double(), torch.randn(4, 3).double()]
    for dtype in (torch.float32, torch.bfloat16):
        drawn = [x.to(dtype) for x in exact]
        results = []
        for convolve, given in (
            (short_conv_module._tap_by_tap, drawn),
            (by_torch, drawn),
            (by_torch, [x.double() for x in drawn]),
        ):
            leaves = [x.detach().requires_grad_() for x in given]
            y = convolve(leaves[0], leaves[1], activated)
            results.append((y, *gradients(y, leaves)))
        for ours, theirs, truth in zip(*results, strict=True):
            assert ours.dtype == dtype
            assert_as_accurate(ours, theirs, truth)


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("offsets", [[0, 1], [0, 3], [0, 20], [0, 1, 2, 5, 12, 20]])
def test_the_convolution_starts_afresh_at_documents(offsets: list[int], activated: bool):
    inputs = [torch.randn(1, offsets[-1], 4).double().requires_grad_(), torch.randn(4, 3).double().requires_grad_()]
    local = LocalDocuments.of(torch.tensor(offsets), 1, offsets[-1], None)
    y, final = short_conv(*inputs, local=local, output_final_state=True, activated=activated)
    expected = torch.cat([convolved(inputs[0][0, a:b], inputs[1]) for a, b in pairwise(offsets)])[None]
    expected = silu(expected) if activated else expected
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients(y, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert final is not None
    for last, (a, b) in zip(final, pairwise(offsets), strict=True):
        kept = inputs[0][0, max(a, b - 2) : b]
        torch.testing.assert_close(last[2 - len(kept) :], kept)
        assert not last[: 2 - len(kept)].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is used where there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("with_state", "activated"), [(True, False), (True, True), (False, False), (False, True)])
@pytest.mark.parametrize(("B", "T", "offsets"), [(2, 70, None), (3, 1, None), (1, 80, [0, 1, 3, 70, 80])])
def test_the_kernel_is_as_accurate(
    B: int, T: int, offsets: list[int] | None, with_state: bool, activated: bool, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """Outputs, states and the gradients of all inputs."""
    fla_core()
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: [0.0])  # the interpreter has no device to time
    torch.manual_seed(0)
    local = LocalDocuments.of(None if offsets is None else torch.tensor(offsets), B, T, None)
    drawn = [torch.randn(shape).to(dtype) for shape in ((B, T, 6), (6, 4), (len(local.lengths), 3, 6))]

    def results(kernel: bool, dtype: torch.dtype) -> list[Tensor]:
        x, weight, state = leaves = [value.to(dtype).requires_grad_() for value in drawn]
        before = state if with_state else None
        if kernel:
            y, final = short_conv_module._by_fla(x, weight, before, local, True, activated)
        else:
            y, final = short_conv(
                x, weight, local=local, initial_NPC=before, output_final_state=True, activated=activated
            )
        assert final is not None
        weights = [torch.randn(r.shape, generator=torch.Generator().manual_seed(1)).to(dtype) for r in (y, final)]
        return [y, final, *torch.autograd.grad([y, final], leaves[: 2 + with_state], weights)]

    names = ["y", "final", "dx", "dweight", "dstate"][: 4 + with_state]
    for name, *values in zip(
        names, results(True, dtype), results(False, dtype), results(False, torch.float64), strict=True
    ):
        assert_as_accurate(*values, what=name)


def test_the_kernel_is_used_on_gpus_unless_algorithms_must_be_deterministic(monkeypatch: pytest.MonkeyPatch):
    fla_core()

    def has_kernel(device: str, dtype: torch.dtype = torch.bfloat16) -> bool:
        with FakeTensorMode():
            x = torch.empty(1, 2, 3, device=device, dtype=dtype)
            return choose(short_conv_module.BACKENDS, x) == short_conv_module._by_fla

    assert has_kernel("cuda")
    assert has_kernel("cuda", torch.float32)
    assert not has_kernel("cuda", torch.float64)
    assert not has_kernel("cpu")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not has_kernel("cuda")
