"""flash-linear-attention: its kernels where an interpreter runs them, and when it is used."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fla_core import fla_core
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import normalize

from tost_lm.mixers.delta import fla
from tost_lm.mixers.delta.layer import DeltaMixer
from tost_lm.mixers.delta.operator import delta_rule
from tost_lm.mixers.delta.settings import DeltaSizes
from tost_lm.ops import backends
from tost_lm.ops.layout import LocalDocuments


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is used where there is no GPU")
@pytest.mark.parametrize("decays", [(4,), (4, 6)], ids=["of heads", "of channels"])
@pytest.mark.parametrize(("B", "T", "offsets"), [(2, 3, None), (1, 7, [0, 1, 5, 7])])
def test_the_recurrent_kernel_agrees_in_the_interpreter(
    B: int, T: int, offsets: list[int] | None, decays: tuple[int, ...]
):
    fla_core()
    torch.manual_seed(0)
    local = LocalDocuments.of(None if offsets is None else torch.tensor(offsets), B, T, None)
    h = 2 if len(decays) == 1 else 4
    query, key = (normalize(torch.randn(B, T, h, 6), dim=-1) for _ in range(2))
    inputs = query, key, torch.randn(B, T, 4, 5), -torch.rand(B, T, *decays), 2 * torch.rand(B, T, 4)
    state = torch.randn(len(local.whole_lengths), 4, 6, 5).double()
    expected, expected_final = delta_rule(*inputs, local=local, initial_state=state, output_final_state=True)
    y, final = fla.delta_rule(*inputs, state, local)
    assert final is not None
    assert final.dtype == torch.float64
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(final, expected_final, rtol=1e-6, atol=1e-6)
    empty, no_final = fla.delta_rule(*inputs, None, local, False)
    assert no_final is None
    torch.testing.assert_close(empty, delta_rule(*inputs, local=local)[0], rtol=1e-6, atol=1e-6)


def obstacle(device: str, dtype: torch.dtype, size: int, *, trained: bool = True) -> str | None:
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla, "needs_gradient", lambda *_: trained)
        x, rate = (torch.empty(1, 1, 1, *last, device=device, dtype=dtype) for last in ([size], []))
        return fla.obstacle(x, x, x, rate, rate, x, LocalDocuments.of(None, 1, 1, None))


def test_kernels_are_used_for_16_bit_values_on_gpus():
    fla_core()
    assert obstacle("cuda", torch.bfloat16, 256) is None
    assert obstacle("cuda", torch.float16, 128) is None
    assert obstacle("cpu", torch.bfloat16, 128) == "the input is on cpu, but its kernels run on CUDA devices"
    assert str(obstacle("cuda", torch.float32, 128)).startswith("the input is torch.float32, but its kernels support")
    assert obstacle("cuda", torch.bfloat16, 257) == "keys have 257 channels, but its kernels support up to 256"


@pytest.fixture
def fresh_answers() -> Iterator[None]:
    cached = fla.missing_in_training, fla._guards_backward
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("fresh_answers")
def test_without_the_package_the_reason_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "find_spec", lambda _: None)
    for trained in (True, False):
        assert "fla-core is not installed; run pip" in str(obstacle("cuda", torch.bfloat16, 8, trained=trained))


@pytest.mark.usefixtures("fresh_answers")
@pytest.mark.parametrize(("capability", "triton", "guarded"), [
    ((9, 0), "3.6.0", True), ((9, 0), "3.7.0+git1", True), ((9, 0), "3.7.1", False), ((9, 0), "3.3.1", False),
    ((8, 0), "3.6.0", False),
])  # fmt: skip
def test_training_with_kernels_that_triton_miscompiles_is_refused(
    capability: tuple[int, int], triton: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
):
    fla_core()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fla, "version", lambda package: triton)
    errors = {32: 0.01, 128: 0.4}
    monkeypatch.setattr(fla, "gradient_error", lambda device, sizes, _: errors[sizes.key_size])

    def layer_on(device: str, size: int, of_channels: bool = False) -> Any:
        weight = SimpleNamespace(device=torch.device(device))
        return SimpleNamespace(
            in_proj=SimpleNamespace(weight=weight), key_heads=1, heads=1, key_size=size, value_size=size,
            of_channels=of_channels,
        )  # fmt: skip

    assert DeltaMixer.missing_kernels(layer_on("cpu", 64)) is None
    right, wrong_block, wrong = (DeltaMixer.missing_kernels(layer_on("cuda", size)) for size in (32, 64, 128))
    assert right is None
    assert ("of 33 to 64 channels, here 64, for Hopper" in str(wrong_block)) == guarded
    assert (
        wrong == "fla-core's kernels have relative errors of 0.4 in gradients here; install torch>=2.12.1"
    ) == guarded
    assert obstacle("cuda", torch.bfloat16, 64, trained=False) is None  # the forward pass is right
    right, wrong = (DeltaMixer.missing_kernels(layer_on("cuda", size, of_channels=True)) for size in (32, 128))
    assert right is None
    assert str(wrong).endswith("install another version of fla-core")  # on any GPU


def test_only_our_backward_passes_the_guard_of_fla(monkeypatch: pytest.MonkeyPatch):
    """Of the operator, all else but the guarded function is left out; the machine is taken for a Hopper GPU."""
    chunk_o = fla_core("fla.ops.common.chunk_o")
    for name, value in (("IS_NVIDIA_HOPPER", True), ("TRITON_ABOVE_3_4_0", True), ("TRITON_ABOVE_3_7_1", False)):
        monkeypatch.setattr(chunk_o, name, value)
    monkeypatch.setattr(chunk_o, "chunk_bwd_kernel_dqkwg", Reached())
    chunk = fla_core("fla.ops.gated_delta_rule.chunk")

    def forward(v: Tensor, g: Tensor, initial_state: Tensor, **_: Any) -> tuple[Tensor | None, ...]:
        return g, v.clone(), v, initial_state, initial_state, None

    def inner_backward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor, **_: Any) -> None:
        chunk.chunk_bwd_dqkwg(q=q, k=k, v=v, do=do, h=q, dh=q, w=k, g=g, dv=v, scale=1.0)

    monkeypatch.setattr(chunk, "chunk_gated_delta_rule_fwd", forward)
    monkeypatch.setattr(chunk, "chunk_gated_delta_rule_bwd", inner_backward)

    def backward(rule: Any) -> None:
        q, k, v, state = (torch.randn(1, 64, 1, 16, requires_grad=True) for _ in range(4))
        g, beta = -torch.rand(1, 64, 1), torch.rand(1, 64, 1)
        y, _ = rule(q=q, k=k, v=v, g=g, beta=beta, scale=1.0, initial_state=state, output_final_state=True)
        y.sum().backward()

    for rule, error in (
        (chunk.chunk_gated_delta_rule, RuntimeError),
        (fla._chunks_without_guard(), ReachedError),
        (chunk.chunk_gated_delta_rule, RuntimeError),
    ):
        with pytest.raises(error):
            backward(rule)
        assert not chunk_o.TRITON_ABOVE_3_7_1


class ReachedError(Exception):
    pass


class Reached:
    """In place of a kernel."""

    def __getitem__(self, grid: Any) -> Any:
        raise ReachedError


@pytest.mark.parametrize("of_channels", [False, True])
@pytest.mark.parametrize("error", [0.0, 0.5])
def test_wrong_gradients_are_noticed(error: float, of_channels: bool, monkeypatch: pytest.MonkeyPatch):
    """The comparison with kernels in bfloat16 that are right, and with an error in the gradient of a decay."""

    def kernels(*tensors: Any) -> tuple[Tensor, Tensor]:
        *inputs, initial, local = tensors
        log_decay = inputs[3]
        if error:
            inputs[3] = log_decay + error * (log_decay - log_decay.detach())
        y, final = delta_rule(*inputs, local=local, initial_state=initial, output_final_state=True)
        assert final is not None
        return y, final

    monkeypatch.setattr(fla, "delta_rule", kernels)
    found = fla.gradient_error(torch.device("cpu"), DeltaSizes(1 + of_channels, 2, 16, 8), of_channels)
    assert 0 < found < 0.02 if not error else found > fla.LARGEST_ERROR
