"""Counts against the real model: parameters, products as torch counts them, and attention."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.flops import block_weights, end_weights, flops_per_token, parameters, peak_flops

pytestmark = pytest.mark.quick

B, T = 2, 12


def config_of(**settings: Any) -> ModelConfig:
    shape = {"layers": 2, "heads": 2, "width": 8, "vocab_size": 24, "max_positions": T}
    return validate(ModelConfig, {**shape, **settings}, "test")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pattern": "TA", "bias": True},
        {"pattern": "A", "layer_scale": 0.0, "positions": "none"},
        {"pattern": "TD", "layer_scale": 0.0},
        {"pattern": "DA", "bias": True, "delta": {"qk_heads": 2, "value_heads": 4, "value_size": 5}},
        {"pattern": "A", "norm_after": "A", "mlp_hidden": 12, "softmax": {"kv_heads": 1, "qk_norm": "all-heads"}},
        {"pattern": "A", "norm": "rms", "mlp": "swiglu", "tied_head": False, "bias": True},
    ],
)
def test_parameters_are_those_of_the_model(settings: dict[str, Any]):
    config = config_of(**settings)
    counted = parameters(config)
    model = TostLM(config)
    weights = [*end_weights(config), *(one for letter in config.letters for one in block_weights(config, letter))]
    shapes = sorted((len(p), p.numel()) for p in model.parameters())
    assert sorted((weight.rows, weight.size) for weight in weights) == shapes
    assert counted.total == sum(p.numel() for p in model.parameters())
    assert counted.total - counted.positions == model.parameter_count()


@pytest.mark.parametrize(
    "settings",
    [
        {"pattern": "T"},
        {"pattern": "A"},
        {"pattern": "TA"},
        {"pattern": "TA", "mlp": "swiglu", "softmax": {"kv_heads": 1, "gate": True}},
    ],
)
def test_products_are_what_torch_counts(settings: dict[str, Any]):
    config = config_of(**settings)
    model, tokens = TostLM(config), torch.randint(24, (B, T))
    flops = flops_per_token(config, T)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, output_state=False).logits.sum().backward()
    forward = counter.get_total_flops() / 3
    # torch counts all T keys of each token, of which (T + 1) / 2 are seen.
    attention = flops.attention.forward * T / ((T + 1) / 2)
    assert forward == B * T * (flops.products.forward + attention)
    assert flops.products.backward == 2 * flops.products.forward
    assert flops.attention.backward == 2 * flops.attention.forward
    with FlopCounterMode(display=False) as with_loss, sdpa_kernel(SDPBackend.MATH):
        model(tokens, labels=tokens, output_state=False).loss.backward()
    not_counted = 2 * B * T * 24 * 8  # by torch: addmm_, of the head's weight gradient
    assert with_loss.get_total_flops() + not_counted == counter.get_total_flops()  # nothing twice


@pytest.mark.parametrize("pattern", ["D", "DA", "TD"])
def test_products_of_linear_layers_are_what_torch_counts(pattern: str):
    config = config_of(pattern=pattern, softmax={"window": 4})
    with FlopCounterMode(display=False) as counter:
        TostLM(config)(torch.randint(24, (B, T)), output_state=False).logits.sum().backward()
    # The operator and attention use other kinds of products: bmm and convolution.
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == B * T * flops_per_token(config, T).products.total


@pytest.mark.parametrize("window", [0, 1, 5, T, 2 * T])
def test_attention_counts_what_a_token_sees(window: int):
    config = config_of(pattern="A", softmax={"window": window})
    seen = sum(min(t, window or t) for t in range(1, T + 1))
    assert flops_per_token(config, T).attention.forward * T == pytest.approx(2 * 4 * 8 * seen)
    assert flops_per_token(config_of(), T).attention.total == 0


def test_the_operator_is_linear_in_the_tokens_and_small():
    config = validate(ModelConfig, {"preset": "tost-base"}, "test")
    short, long = flops_per_token(config, 128), flops_per_token(config, 1 << 20)
    assert short == long
    assert short.operator.total < 1e-3 * short.products.total


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("cpu", None),
    ],
)
def test_peaks_by_the_name_that_torch_gives(name: str, tflops: float | None):
    assert peak_flops(name, "bfloat16") == (tflops and tflops * 1e12)
    assert (peak_flops(name, "float32") is None) == (tflops is None)
