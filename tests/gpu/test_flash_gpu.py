"""Softmax layers in 16-bit types on a GPU, where flash attention computes them, against float64 on the CPU."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM
from tost_lm.testing import assert_as_accurate

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

TOKENS = 700


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "softmax", [{}, {"window": 64}, {"kv_heads": 2, "qk_norm": True}, {"kv_heads": 1, "window": 129}], ids=str
)
def test_flash_attention_is_as_accurate_as_the_tiles(softmax: dict[str, Any], dtype: torch.dtype):
    shape = {"pattern": "A", "layers": 2, "heads": 4, "width": 256, "vocab_size": 50, "positions": "none"}
    torch.manual_seed(0)
    model = TostLM(validate(ModelConfig, {**shape, "softmax": softmax}, "test")).to(dtype)
    tokens = torch.randint(50, (1, TOKENS))
    exact = logits_and_gradients(deepcopy(model).double(), tokens)
    plain = logits_and_gradients(model, tokens)  # tiles of the CPU, in the same type
    ours = logits_and_gradients(model.cuda(), tokens)
    for name, truth in exact.items():
        assert_as_accurate(ours[name], plain[name], truth, name, 4)
