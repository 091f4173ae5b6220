"""TensorFloat-32 is set in both directions and never for a CPU; kernels that add in a fixed order are asked for."""

import os
from collections.abc import Iterator

import pytest
import torch

from tost_lm.errors import ConfigError
from tost_lm.model import ModelConfig
from tost_lm.pretrain.engine import set_matmul_precision, use_deterministic_kernels, use_flash_attention_3

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _settings_of_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.set_float32_matmul_precision(before)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]


def test_torch_and_cublas_are_asked_for_determinism():
    use_deterministic_kernels(ModelConfig(pattern="TA", layers=2, heads=2, width=16), CUDA)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_mixer_that_is_not_deterministic_is_rejected_on_a_gpu():
    model = ModelConfig(pattern="DDDA", layers=4, heads=2, width=16)
    with pytest.raises(ConfigError, match=r"^train\.deterministic: the kernels of delta layers .* model\.pattern$"):
        use_deterministic_kernels(model, CUDA)
    assert not torch.are_deterministic_algorithms_enabled()
    use_deterministic_kernels(model, torch.device("cpu"))


def test_flash_attention_3_is_refused_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"^train\.attention fa3: .* this device is cpu; .* train\.attention=fa2$"):
        use_flash_attention_3(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="this device is NVIDIA A100"):
        use_flash_attention_3(CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match="No module named 'flash_attn_interface'; install flash-attn-3, or set"):
        use_flash_attention_3(CUDA)
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")  # as in torch 2.11
    with pytest.raises(ConfigError, match=r"torch 2\.\S+ cannot call it; install torch ≥ 2\.13, or set"):
        use_flash_attention_3(CUDA)


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize(
    ("tf32", "device", "after"), [(True, "cuda", True), (False, "cuda", False), (True, "cpu", False)]
)
def test_the_setting_replaces_what_the_process_had(before: str, tf32: bool, device: str, after: bool):
    torch.set_float32_matmul_precision(before)
    set_matmul_precision(tf32, torch.device(device))
    assert torch.backends.cuda.matmul.allow_tf32 == after
    assert torch.get_float32_matmul_precision() == ("high" if after else "highest")
