"""Forms of norm, MLP, head and softmax attention against plain formulas, in float64, with every gradient."""

import math
from typing import Any

import pytest
import torch
from other_forms import other_forms
from torch import Tensor

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.mixers.softmax.settings import SoftmaxSettings
from tost_lm.model import ModelConfig, TostLM
from tost_lm.parallel.settings import obstacle_to_tensor_ranks
from tost_lm.testing import assert_close

pytestmark = pytest.mark.quick

LAYERS, HEADS, WIDTH, VOCAB, T = 2, 4, 16, 17, 7
FORMS: dict[str, dict[str, Any]] = {
    "rms": {"norm": "rms", "bias": True},
    "swiglu": {"mlp": "swiglu", "bias": True},
    "untied head": {"tied_head": False},
    "grouped queries": {"softmax": {"kv_heads": 2, "rope_scaling_factor": 8.0, "rope_original_length": 1000}},
    "norms of queries and keys": {"softmax": {"qk_norm": True}},
    "all": {**other_forms(window=3), "bias": True},
    "norms after, of all heads": {
        "norm": "rms",
        "norm_after": "A",
        "norm_epsilon": 0.1,
        "mlp": "swiglu",
        "mlp_hidden": 24,
        "softmax": {"qk_norm": "all-heads", "kv_heads": 2},
    },
    "LayerNorm after": {"norm_after": "A", "bias": True, "mlp_hidden": 24},
    "one key": {
        "softmax": {"kv_heads": 1, "window": T, "rope_scaling": "linear", "rope_scaling_factor": 3.0},
        "bias": True,
    },
}
all_forms = pytest.mark.parametrize("form", FORMS)


def config_of(form: str) -> ModelConfig:
    shape = {"layers": LAYERS, "heads": HEADS, "width": WIDTH, "vocab_size": VOCAB, "positions": "none"}
    return validate(ModelConfig, {"pattern": "A", "layer_scale": 1.0, "bias": False, **shape, **FORMS[form]}, "test")


def drawn_model(form: str) -> TostLM:
    """Every parameter shows in the logits."""
    torch.manual_seed(0)
    model = TostLM(config_of(form)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.dim() == 1) + 0.3 * torch.randn_like(parameter))
    return model


def by_formula(p: dict[str, Tensor], config: ModelConfig, tokens: Tensor) -> Tensor:
    """The logits of a model of A layers from its named weights."""
    x = p["embedding.weight"][tokens]
    for i in range(LAYERS):
        q = {name.removeprefix(f"blocks.{i}."): value for name, value in p.items() if name.startswith(f"blocks.{i}.")}
        norms = (lambda name, z: z, lambda name, z, q=q: normed(q, name, config, z))
        before, after = norms if config.norm_after else norms[::-1]
        y = linear(q, "mixer.out_proj", attention(q, config, before("mixer_norm", x)))
        x = x + q["mixer_scale.gamma"] * after("mixer_norm", y)
        h = linear(q, "mlp.in_proj", before("mlp_norm", x))
        if config.mlp == "swiglu":
            gate, up = h.chunk(2, -1)
            h = gate / (1 + torch.exp(-gate)) * up
        else:
            h = 0.5 * h * (1 + torch.erf(h / 2**0.5))
        x = x + q["mlp_scale.gamma"] * after("mlp_norm", linear(q, "mlp.out_proj", h))
    return normed(p, "norm", config, x) @ p["embedding.weight" if config.tied_head else "head.weight"].T


def linear(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)


def normed(p: dict[str, Tensor], name: str, config: ModelConfig, x: Tensor) -> Tensor:
    if config.norm != "layer":
        return scaled(p, name, config, x)
    return scaled(p, name, config, x - x.mean(-1, keepdim=True)) + p.get(f"{name}.bias", 0)


def scaled(p: dict[str, Tensor], name: str, config: ModelConfig, x: Tensor) -> Tensor:
    factor = p[f"{name}.weight"] + (config.norm == "rms-zero-centered")
    return x / ((x**2).mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * factor


def attention(p: dict[str, Tensor], config: ModelConfig, x: Tensor) -> Tensor:
    own, D = config.softmax, config.softmax.head_size or WIDTH // HEADS
    heads_of_keys = own.kv_heads or HEADS
    counts = [HEADS, heads_of_keys, heads_of_keys, *([HEADS] if own.gate else [])]
    q, k, v, *gate = linear(p, "mixer.in_proj", x).unflatten(-1, (-1, D)).split(counts, -2)
    heads = []
    norm_q, norm_k = (lambda x, name=name: scaled(p, f"mixer.{name}_norm", config, x) for name in "qk")
    if own.qk_norm == "all-heads":
        q, k = norm_q(q.flatten(-2)).view_as(q), norm_k(k.flatten(-2)).view_as(k)
    for h in range(HEADS):
        g = h * heads_of_keys // HEADS
        q_h, k_h, v_h = q[..., h, :], k[..., g, :], v[..., g, :]
        if own.qk_norm is True:
            q_h, k_h = norm_q(q_h), norm_k(k_h)
        scores = rotated(q_h, config) @ rotated(k_h, config).mT / D**0.5
        ones = torch.ones(T, T, dtype=torch.bool)
        seen = ones.tril() & ones.triu(1 - (own.window or T))
        heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v_h)
    return torch.cat(heads, -1) * (torch.sigmoid(gate[0].flatten(-2)) if gate else 1)


def rotated(x: Tensor, config: ModelConfig) -> Tensor:
    """Channel d and d + R/2 of position t are a complex number that is turned by t times its speed."""
    own, R = config.softmax, int(x.shape[-1] * config.softmax.rotary_fraction)
    speeds = torch.tensor([speed_of(d, R, own) for d in range(R // 2)], dtype=torch.float64)
    angle = torch.arange(T).double()[:, None] * speeds
    size = torch.full_like(angle, 1 + math.log(own.rope_scaling_factor) / 10 if own.rope_scaling == "yarn" else 1)
    turned = torch.complex(x[..., : R // 2], x[..., R // 2 : R]) * torch.polar(size, angle)
    return torch.cat([turned.real, turned.imag, x[..., R:]], -1)


def speed_of(d: int, R: int, own: SoftmaxSettings) -> float:
    """10000^(-2d/R), divided by the factor or by less: the fraction that is kept grows with the turns in the original
    length from 1 to 4 (llama3), or along the channels from the first with at most 1 to the last with 32 (yarn)."""
    speeds = [10000.0 ** (-2 * channel / R) for channel in range(R)]
    turns = [own.rope_original_length * speed / (2 * math.pi) for speed in speeds]
    kept = 0.0
    if own.rope_scaling == "llama3":
        kept = (turns[d] - 1) / 3
    elif own.rope_scaling == "yarn":
        begin, end = max(0, sum(x >= 32 for x in turns) - 1), sum(x > 1 for x in turns)
        kept = (end - d) / (end - begin)
    kept = min(max(kept, 0), 1)
    return speeds[d] * (kept + (1 - kept) / own.rope_scaling_factor)


def test_a_factor_alone_is_llama_3s_as_in_version_0_1():
    shape = {"pattern": "A", "layers": 1, "heads": 2, "width": 32, "softmax": {"rope_scaling_factor": 8.0}}
    assert validate(ModelConfig, shape, "test").rotary == (16, 1e4, "llama3", 8.0, 8192)


@all_forms
def test_logits_and_every_gradient_equal_the_formulas(form: str):
    model, config = drawn_model(form), config_of(form)
    tokens = torch.randint(VOCAB, (2, T), generator=torch.Generator().manual_seed(1))
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    ours, theirs = model(tokens).logits, by_formula(copies, config, tokens)
    assert_close(ours, theirs, 1e-12, "logits")
    pull = torch.randn_like(theirs)
    gradients = torch.autograd.grad(ours, [*model.parameters()], pull)
    for name, mine, expected in zip(
        copies, gradients, torch.autograd.grad(theirs, [*copies.values()], pull), strict=True
    ):
        assert_close(mine, expected, 1e-11, name)


@pytest.mark.parametrize(("width", "hidden"), [(16, 256), (96, 256), (97, 512), (768, 2048), (2048, 5632)])
def test_hidden_channels_of_a_swiglu(width: int, hidden: int):
    config = ModelConfig(layers=1, heads=1, width=width, mlp="swiglu")
    assert config.mlp_width == hidden


def test_settings_that_do_not_fit_are_named():
    with pytest.raises(
        ConfigError, match=r"model\.heads 4 is not a multiple of model\.softmax\.kv_heads 3; change one of them"
    ):
        validate(ModelConfig, {"layers": 1, "heads": 4, "width": 8, "softmax": {"kv_heads": 3}, "pattern": "A"}, "test")
    three = validate(ModelConfig, {"layers": 1, "heads": 3, "width": 12, "mlp": "swiglu"}, "test")
    assert obstacle_to_tensor_ranks(three, 3) == (
        "the 256 hidden channels of model.mlp 'swiglu' are not divisible by parallel.tensor 3; choose a divisor of them"
    )
    olmo = validate(
        ModelConfig, {"layers": 1, "heads": 2, "width": 8, "pattern": "A", **FORMS["norms after, of all heads"]}, "test"
    )
    assert obstacle_to_tensor_ranks(olmo, 2) == (
        "tensor ranks cannot split softmax.qk_norm all-heads; set parallel.tensor=1 and use sequence ranks"
    )
    with pytest.raises(ConfigError, match=r"model\.norm_after 'AB': no mixer has the letter B; leave it out"):
        validate(ModelConfig, {"layers": 1, "heads": 4, "width": 8, "pattern": "A", "norm_after": "AB"}, "test")
