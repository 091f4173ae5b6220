"""Every mixer in 16-bit types on a GPU, with packed documents and states, against float64 on the CPU."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM
from tost_lm.pretrain.engine import use_flash_attention_3
from tost_lm.testing import assert_as_accurate

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

TOKENS, DEVICE = 700, "cuda"


def logits_and_gradients(model: TostLM, tokens: Tensor) -> dict[str, Tensor]:
    """Documents in two calls: the fourth one continues in the second."""
    device, cut = model.embedding.weight.device, 300
    first = model(tokens[:, :cut].to(device), cu_seqlens=torch.tensor([0, 1, 130, 131, cut]), output_state="last")
    second = model(tokens[:, cut:].to(device), state=first.state, cu_seqlens=torch.tensor([0, 200, 400]))
    logits = torch.cat([first.logits, second.logits], 1)
    pull = torch.linspace(-1, 1, logits.numel()).view_as(logits).to(logits)
    gradients = torch.autograd.grad(logits, list(model.parameters()), pull)
    names = [name for name, _ in model.named_parameters()]
    return {"logits": logits.detach().cpu(), **{n: d.cpu() for n, d in zip(names, gradients, strict=True)}}


MODELS: list[dict[str, Any]] = [
    {"pattern": "T", "tssa": {"denom_bias": "head"}},
    {"pattern": "D"},
    {"pattern": "D", "delta": {"qk_heads": 2, "value_heads": 4, "value_size": 96, "beta_to_two": True}},
    {"pattern": "D", "delta": {"decay_per_channel": True}},
    {"pattern": "A"},
    {"pattern": "A", "softmax": {"window": 64, "conv": True}},
    {"pattern": "A", "softmax": {"kv_heads": 2, "qk_norm": True}},
    {"pattern": "A", "softmax": {"kv_heads": 1, "window": 129}},
    {"pattern": "DA", "norm": "rms", "norm_after": "A", "mlp": "swiglu", "softmax": {"qk_norm": "all-heads"}},
]


@pytest.fixture
def _flash_attention_3() -> Iterator[None]:
    pytest.importorskip("flash_attn_interface", reason="needs flash-attn-3")
    use_flash_attention_3(torch.device(DEVICE))
    yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.usefixtures("_flash_attention_3")
@pytest.mark.parametrize("settings", [settings for settings in MODELS if "A" in settings["pattern"]], ids=str)
def test_flash_attention_3_is_as_accurate(settings: dict[str, Any]):
    test_kernels_are_as_accurate_as_a_cpu_in_the_same_type(settings, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("settings", MODELS, ids=str)
def test_kernels_are_as_accurate_as_a_cpu_in_the_same_type(settings: dict[str, Any], dtype: torch.dtype):
    shape = {"layers": 2, "heads": 4, "width": 256, "vocab_size": 50, "positions": "none", "layer_scale": 1.0}
    torch.manual_seed(0)
    model = TostLM(validate(ModelConfig, {**shape, **settings}, "test")).to(dtype)
    tokens = torch.randint(50, (1, TOKENS))
    exact = logits_and_gradients(deepcopy(model).double(), tokens)
    plain = logits_and_gradients(deepcopy(model), tokens)
    ours = logits_and_gradients(model.to(DEVICE), tokens)
    for name, truth in exact.items():
        assert_as_accurate(ours[name], plain[name], truth, name, 4)
