"""Counts against the real model: parameters, products as torch counts them, attention, and the operator's arithmetic
done number by number."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tost_lm.config import validate
from tost_lm.mixers.tssa.causal import causal_tssa
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.flops import flops_per_token, parameters, peak_flops

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
        {"pattern": "A", "layer_scale": 0.0, "positions": "sinusoidal"},
        {"tssa": {"denom_bias": "head"}, "positions": "none"},
        {"tssa": {"denom_bias": "none"}, "bias": True},
        {"pattern": "TD", "layer_scale": 0.0},
        {"pattern": "DA", "bias": True, "delta": {"qk_heads": 2, "value_heads": 4, "value_size": 5}},
        {"pattern": "A", "norm_after": "A", "mlp_hidden": 12, "softmax": {"kv_heads": 1, "qk_norm": "all-heads"}},
        {"pattern": "A", "norm": "rms-zero-centered", "softmax": {"head_size": 6, "gate": True, "qk_norm": True}},
        {
            "pattern": "A",
            "norm": "rms",
            "mlp": "swiglu",
            "tied_head": False,
            "softmax": {"kv_heads": 1, "qk_norm": True},
            "bias": True,
        },
    ],
)
def test_parameters_are_those_of_the_model(settings: dict[str, Any]):
    config = config_of(**settings)
    counted = parameters(config)
    model = TostLM(config)
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


class Counted(float):
    """A number that counts what is done with it. Signs are free."""

    operations = 0

    def __neg__(self) -> "Counted":
        return Counted(-float(self))


def _counting(name: str):
    def operate(self: Counted, other: float) -> Counted:
        Counted.operations += 1
        return Counted(getattr(float, name)(self, float(other)))

    return operate


for _name in ("add", "sub", "mul", "truediv"):
    setattr(Counted, f"__{_name}__", _counting(f"__{_name}__"))


def total(numbers: Sequence[float]) -> float:
    first, *rest = numbers
    for number in rest:
        first = first + number
    return first


def exp(x: float) -> float:
    Counted.operations += 1
    return Counted(math.exp(x))


@pytest.mark.parametrize("membership", ["energy-share", "energy-mean"])
@pytest.mark.parametrize("biased", [True, False])
def test_the_operator_done_number_by_number(membership: Any, biased: bool):
    H, D, tokens = 2, 3, 4
    torch.manual_seed(0)
    w, g = torch.randn(2, 1, tokens, H, D, dtype=torch.float64)
    w.requires_grad_()
    temp = torch.rand(H, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(H, tokens, dtype=torch.float64, requires_grad=True) if biased else None
    y, _ = causal_tssa(w, temp, bias, membership=membership)
    y.backward(g)

    by_hand = ByHand(w[0], g[0], temp, bias, membership)
    Counted.operations = 0
    ours = by_hand.forward()
    forward = Counted.operations
    d_w, d_temp, d_bias = by_hand.backward()
    backward = Counted.operations - forward

    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), y[0].detach())
    torch.testing.assert_close(torch.tensor(d_w, dtype=torch.float64), w.grad[0])  # pyright: ignore[reportOptionalSubscript]
    torch.testing.assert_close(torch.tensor(d_temp, dtype=torch.float64), temp.grad)
    if bias is not None:
        torch.testing.assert_close(torch.tensor(d_bias, dtype=torch.float64).T, bias.grad)
    config = config_of(
        heads=H, width=H * D, layers=3, tssa={"membership": membership, "denom_bias": "position" if biased else "none"}
    )
    operator = flops_per_token(config, tokens).operator
    assert (forward, backward) == (operator.forward / 3 * tokens, operator.backward / 3 * tokens)


class ByHand:
    """The operator's formulas and their closed-form backward, a multiplication at a time; [t][h][d] and [t][h]."""

    def __init__(self, w: torch.Tensor, g: torch.Tensor, temp: torch.Tensor, bias: Any, membership: str):
        self.w, self.g = ([[[Counted(x) for x in head] for head in token] for token in x.tolist()] for x in (w, g))
        self.temp = [Counted(x) for x in temp.tolist()]
        self.bias = None if bias is None else [[Counted(x) for x in row] for row in bias.T.tolist()]
        self.mean = membership == "energy-mean"
        self.T, self.H, self.D = w.shape

    def scale(self, t: int) -> float:
        return (t + 1) / self.D

    def forward(self) -> list[list[list[float]]]:
        T, H, D = range(self.T), range(self.H), range(self.D)
        zero = Counted(0)
        energy, weighted = ([[zero] * self.D for _ in H] for _ in range(2))
        mass = [zero] * self.H
        self.w_sq, self.energy, self.weighted, self.mass, self.pi, self.shares, ys = [], [], [], [], [], [], []
        for t in T:
            w = self.w[t]
            w_sq = [[w[h][d] * w[h][d] for d in D] for h in H]
            energy = [[energy[h][d] + w_sq[h][d] for d in D] for h in H]
            shares = [total([w_sq[h][d] / energy[h][d] for d in D]) for h in H]
            scores = [shares[h] * self.scale(t) for h in H] if self.mean else shares
            if self.bias is not None:
                bias = self.bias[t] if self.mean else [self.bias[t][h] * self.D for h in H]
                scores = [scores[h] + bias[h] for h in H]
            z = [self.temp[h] * scores[h] for h in H]
            pi = softmax(z)
            weighted = [[weighted[h][d] + pi[h] * w_sq[h][d] for d in D] for h in H]
            mass = [mass[h] + pi[h] for h in H]
            floored = [mass[h] + 1e-8 for h in H]
            y = []
            for h in H:
                factor = -(pi[h] * floored[h])
                y.append([factor * w[h][d] / (weighted[h][d] + floored[h]) for d in D])
            ys.append(y)
            for kept, new in zip(
                (self.w_sq, self.energy, self.weighted, self.mass, self.pi, self.shares),
                (w_sq, energy, weighted, floored, pi, scores),
                strict=True,
            ):
                kept.append(new)
        return ys

    def backward(self) -> tuple[Any, Any, Any]:
        H, D = range(self.H), range(self.D)
        zero = Counted(0)
        r2, r1 = ([[zero] * self.D for _ in H] for _ in range(2))
        rn, d_temp = [zero] * self.H, [zero] * self.H
        d_w, d_bias = [], []
        for t in reversed(range(self.T)):
            g, w, w_sq, pi = self.g[t], self.w[t], self.w_sq[t], self.pi[t]
            energy, weighted, mass = self.energy[t], self.weighted[t], self.mass[t]
            # N′ + S2 is the forward's.
            whole = [[Counted(float(weighted[h][d]) + float(mass[h])) for d in D] for h in H]
            dy_a = [[g[h][d] * mass[h] / whole[h][d] for d in D] for h in H]
            dy_a_w = [[dy_a[h][d] * w[h][d] for d in D] for h in H]
            q = [[dy_a_w[h][d] * pi[h] / whole[h][d] for d in D] for h in H]
            r2 = [[r2[h][d] + q[h][d] for d in D] for h in H]
            rn = [rn[h] + -(total([q[h][d] * weighted[h][d] for d in D]) / mass[h]) for h in H]
            d_pi = [total([r2[h][d] * w_sq[h][d] - dy_a_w[h][d] for d in D]) + rn[h] for h in H]
            mean = total([pi[h] * d_pi[h] for h in H])
            d_z = [pi[h] * (d_pi[h] - mean) for h in H]
            d_temp = [d_temp[h] + d_z[h] * self.shares[t][h] for h in H]
            d_score = [self.temp[h] * d_z[h] for h in H]
            u = [d_score[h] * self.scale(t) for h in H] if self.mean else d_score
            if self.bias is not None:
                here = d_score if self.mean else [d_score[h] * self.D for h in H]
                d_bias.append([zero + here[h] for h in H])
            row = []
            for h in H:
                for_head = []
                for d in D:
                    share = Counted(float(w_sq[h][d]) / float(energy[h][d]))  # the forward's
                    minus_d_share = -(u[h] / energy[h][d])
                    r = share * minus_d_share
                    through = r2[h][d] * pi[h] - (minus_d_share - r) + r1[h][d]
                    r1[h][d] = r1[h][d] + r
                    for_head.append(-(dy_a[h][d] * pi[h]) + through * w[h][d] * 2)
                row.append(for_head)
            d_w.append(row)
        return d_w[::-1], d_temp, d_bias[::-1]


def softmax(z: Sequence[float]) -> list[float]:
    raised = [exp(x - max(z)) for x in z]
    whole = total(raised)
    return [x / whole for x in raised]


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
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
        ("cpu", None),
    ],
)
def test_peaks_by_the_name_that_torch_gives(name: str, tflops: float | None):
    assert peak_flops(name, "bfloat16") == (tflops and tflops * 1e12)
    assert (peak_flops(name, "float32") is None) == (tflops is None)
