"""The kernel of the loss against the PyTorch path and float64, in Triton's interpreter where there is no GPU."""

from types import SimpleNamespace

import pytest
import torch
from test_triton_compiles import compile_kernels
from torch import Tensor
from torch.nn.functional import linear

from tost_lm.ops import cross_entropy as loss
from tost_lm.testing import assert_as_accurate

pytest.importorskip("triton")
from tost_lm.ops import cross_entropy_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M, C, V = 13, 6, 37


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    """Chooses the backend; a tile has five tokens of float32 logits, a token several blocks of them."""
    monkeypatch.setattr(cross_entropy_triton, "BLOCK", 16)
    for name in ("LOGITS_BYTES", "DEVICE_LOGITS_BYTES"):
        monkeypatch.setattr(loss, name, 5 * V * 4)
    return lambda kernels: monkeypatch.setattr(loss, "_kernels", lambda x: cross_entropy_triton if kernels else None)


def drawn(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (scale * torch.randn(shape, generator=generator) for shape in ((M, C), (V, C)))
    labels = torch.randint(V, (M,), generator=generator)
    labels[::4] = loss.IGNORED_LABEL
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE)


def run(
    x: Tensor, weight: Tensor, labels: Tensor, shard: loss.VocabularyShard | None = None, z_loss: float = 0.1
) -> tuple[Tensor, ...]:
    """Sum, nats and gradients, in tiles of five tokens or so."""
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    total, nats, *_ = loss.linear_cross_entropy(x, weight, labels, shard=shard, z_loss=z_loss)
    return total.detach(), nats, *torch.autograd.grad(total / 3, (x, weight))


@pytest.mark.quick
@pytest.mark.parametrize(("scale", "z_loss"), [(1.0, 0.1), (100.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_as_accurate_as_pytorch(backend, dtype: torch.dtype, scale: float, z_loss: float):
    inputs = drawn(dtype, scale)
    results = []
    for kernels in (True, False):
        backend(kernels)
        results.append(run(*inputs, z_loss=z_loss))
    truth = run(inputs[0].double(), inputs[1].double(), inputs[2], z_loss=z_loss)
    for ours, theirs, exact in zip(*results, truth, strict=True):
        assert ours.dtype == theirs.dtype
        assert_as_accurate(ours, theirs, exact)


def test_scores_are_those_of_pytorch(backend):
    x, weight, labels = drawn(torch.float32)
    labels[5] = linear(x, weight)[5].argmax()
    with torch.no_grad():
        backend(False)
        total, nats, is_top, _ = loss.linear_cross_entropy(x, weight, labels)
        backend(True)
        ours = loss.linear_cross_entropy(x, weight, labels)
        backend(False)
        truth = loss.linear_cross_entropy(x.double(), weight.double(), labels)
    assert_as_accurate(ours.total, total, truth.total)
    assert_as_accurate(ours.nats_M, nats, truth.nats_M)
    assert is_top is not None
    assert is_top.any()
    assert ours.is_top_M is not None
    assert torch.equal(ours.is_top_M, is_top)


def run_in_parts(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Like `run`, from two ranks with a part of the vocabulary each. What a rank receives comes from the formulas."""
    parts = []
    for start, end in ((0, 20), (20, V)):
        other = [row for row in range(V) if not start <= row < end]
        tokens = iter(range(0, M, tile := 5 * V // (end - start)))

        def combine(log_sum: Tensor, label: Tensor, other=other, tokens=tokens, tile=tile) -> tuple[Tensor, Tensor]:
            rows = slice(first := next(tokens), first + tile)
            logits = linear(x[rows], weight)
            here = torch.isin(labels[rows], torch.tensor(other, device=DEVICE))
            theirs = logits.gather(1, labels[rows, None].clamp_min(0))[:, 0].where(here, 0)
            return torch.logaddexp(log_sum, logits[:, other].logsumexp(1)), label + theirs

        shard = SimpleNamespace(vocab_start=start, combine_log_sum_exp=combine)
        parts.append(run(x, weight[start:end], labels, shard))  # pyright: ignore[reportArgumentType]
    (total, nats, d_x, d_weight), (_, _, d_x_other, d_weight_other) = parts
    return total, nats, d_x + d_x_other, torch.cat([d_weight, d_weight_other])


def test_two_ranks_have_the_loss_and_gradients_of_one(backend):
    x, weight, labels = drawn(torch.float32)
    backend(True)
    ours = run_in_parts(x, weight, labels)
    backend(False)
    truth = run(x.double(), weight.double(), labels)
    for mine, theirs, exact in zip(ours, run_in_parts(x, weight, labels), truth, strict=True):
        assert_as_accurate(mine, theirs, exact)


def test_a_nan_stays_with_its_token(backend):
    x, weight, labels = drawn(torch.float32)
    backend(True)
    clean = run(x, weight, labels)
    x[5, 0] = torch.nan
    _, nats, d_x, _ = run(x, weight, labels)
    others = [m for m in range(M) if m != 5]
    assert nats[5].isnan()
    assert d_x[5].isnan().any()
    assert torch.equal(nats[others], clean[1][others])
    assert torch.equal(d_x[others], clean[2][others])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernel_compiles_and_stays_in_registers(dtype: str):
    kernels = compile_kernels(f"loss {dtype} 50304")
    assert len(kernels) >= 2
    for kernel in kernels:
        print(*(f"{name}={value}" for name, value in kernel.items()))
        assert kernel["spilled_bytes"] == 0
        assert kernel["registers"] <= 128
