"""Parameters and floating-point operations (FLOPs) of a model, counted exactly from its settings; peak FLOP/s of GPUs.

An operation is an addition, subtraction, multiplication, division or exponential. A product of matrices of M×K and K×N
has 2·M·K·N. Counted: the products of the linear layers and the head, the products of softmax attention, and the
arithmetic of causal TSSA and of slot memory. Not counted: norms, gates of outputs, GELU or
SwiGLU, LayerScale, rotary embedding, the softmax of attention, the loss, the optimizer, and recomputation in the
backward (sums over time in TSSA, scores in attention).

**Products.** Forward: 2 for each token and weight. Backward: twice that, for the gradients of input and weight.

**Softmax attention.** Forward: 4·C·p for a token that attends to p tokens (q·k and Π·v). Backward: twice that. Over a
document of T tokens, p is (T + 1)/2 on average; with a window W < T, it is W − W·(W − 1)/(2T). Other layers have no
such term.

**Causal TSSA**, for each token and layer with C channels in H heads, for any length (`mixers/tssa/chunked.py`;
signs and comparisons are not counted):

    forward                                          C    H         backward                            C    H
    w²                                               1              dy·a                                2
    S1, running sum                                  1              dy·w·a                              1
    Σ_d w²/S1                                        2   −1         q = dy·w·Π·a²/N′                    2
    z: times temp                                         1         R2, running sum                     1
       times t/D (energy-mean)                           (1)        RN: Σ_d q·S2/N′, running sum        2    1
       plus bias                                         (1)        dΠ = Σ_d (R2·w² − dy·w·a) + RN      3
       … times D (energy-share)                          (1)        dz = Π·(dΠ − Σ_h Π·dΠ)                   4 − 1/H
    Π, softmax over heads                                 4 − 1/H   d temp, summed over tokens               2
    Π·w²                                             1              u = temp·dz                              1
    S2, running sum                                  1                times t/D (energy-mean)               (1)
    N, running sum; N′                                    2         r = −u·w²/S1²                       2
    y = −Π·N′·w / (S2 + N′)                          3    1         −u/S1 − r; R1, running sum          2
                                                                    dw = −Π·dy·a + 2w·(Π·R2 + … + R1)   7
                                                                    d bias, summed over rows                (1)
                                                                    … times D (energy-share)                (1)
                                                     9    7         22   8

The sum is 9·C + 7·H − 1 forward and 22·C + 8·H − 1 backward, plus H for each parenthesis that applies. For tost-base
this is less than 0.1 % of the products. `uniform` computes the scores of `energy-share` and does not use them.

**Slot memory**, one token at a time, for each head with S slots of V channels and a convolution of K taps:

    forward                                S·V   S           backward                               S·V   S
    convolution of the key                       2·K − 1     dr: Σ_v dy·M/N′                        2     0
    w, r: times temp, softmax                    10     −2   −dr·r/N′; RN, running sum                    3
    M = ρ·M + w·u                          3                 RM = ρ·RM + r/N′·dy                    3
    N = ρ·N + w; N′                              3           du = Σ_s w·RM                          2          −V
    r/N′                                         1           dw = Σ_v u·RM + RN                     2     0
    y = Σ_s r/N′·M                         2            −V   d log ρ, summed over tokens            2     2
                                                             softmaxes, d temp, times temp                14   −2
                                                             dx and d weight of the convolution           4·K − 1
                                           5   13 + 2·K      11  18 + 4·K

The sum is H·(5·S·V + (13 + 2·K)·S − V − 2) forward and H·(11·S·V + (18 + 4·K)·S − V − 2) backward. The products
of chunks execute more.
"""

import re
from typing import Literal, NamedTuple

from tost_lm.model.config import CONV_TAPS, MIXERS, ModelConfig


class Parameters(NamedTuple):
    """Parameter counts by component."""

    embedding: int
    """Token embedding, and the head's weight if it is not tied to it."""
    positions: int
    mixers: int
    """Projections, and parameters of operators: temp, denom_bias, convolutions, decays."""
    mlps: int
    scales: int
    """Norms and LayerScale."""

    @property
    def total(self) -> int:
        return sum(self)


class Flops(NamedTuple):
    """Operations per token."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


class FlopsPerToken(NamedTuple):
    """FLOPs per token of the whole model, by kind."""

    products: Flops
    attention: Flops
    operator: Flops

    @property
    def total(self) -> float:
        return sum(kind.total for kind in self)


def parameters(config: ModelConfig) -> Parameters:
    C, biased = config.width, int(config.bias)
    tssa = 2 * C * C + 2 * biased * C + config.heads + _bias_numbers(config)
    softmax = _softmax_weights(config) + 2 * biased * (C + config.kv_width)
    H, S, V = config.heads, config.slots, config.slot_channels
    slots = _slot_weights(config) + biased * (H * 2 * (S + V) + C) + H * (S * CONV_TAPS + V + 3)
    layers = layers_by_letter(config)
    of_heads = 2 * layers["A"] * (C // config.heads) if config.qk_norm else 0
    of_norm = C if config.norm == "rms" else (1 + biased) * C
    return Parameters(
        embedding=(1 if config.tied_head else 2) * config.vocab_size * C,
        positions=config.max_positions * C if config.positions == "learned" else 0,
        mixers=layers["T"] * tssa + layers["S"] * slots + layers["A"] * softmax,
        mlps=config.layers * (mlp_weights(config) + biased * ((_mlp_matrices(config) - 1) * config.mlp_width + C)),
        scales=(2 * config.layers + 1) * of_norm + of_heads + (2 * config.layers * C if config.layer_scale else 0),
    )


def vectors(config: ModelConfig) -> tuple[int, int]:
    """Numbers without weight decay (vectors and denom_bias): those that tensor ranks split, and all others."""
    layers, hidden = layers_by_letter(config), (_mlp_matrices(config) - 1) * config.mlp_width
    H, C, biased = config.heads, config.width, int(config.bias)
    into = {"T": C, "S": 2 * H * (config.slots + config.slot_channels), "A": C + 2 * config.kv_width}
    split = layers["T"] * (H + _bias_numbers(config)) + layers["S"] * 3 * H
    split += biased * (config.layers * hidden + sum(layers[letter] * channels for letter, channels in into.items()))
    return split, parameters(config).scales + biased * 2 * config.layers * C


def mlp_weights(config: ModelConfig) -> int:
    """Numbers of the matrices of an MLP."""
    return _mlp_matrices(config) * config.width * config.mlp_width


def _mlp_matrices(config: ModelConfig) -> int:
    """Matrices of width × mlp_width in an MLP: into each tensor of its hidden channels, and out."""
    return 3 if config.mlp == "swiglu" else 2


def block_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """Rows and columns of the weights of all linear layers, those of mixers and MLPs."""
    C, hidden, H, V = config.width, config.mlp_width, config.heads, config.slot_channels
    of_mixer = {
        "T": [(C, C), (C, C)],
        "S": [(2 * H * (config.slots + V), C), (C, H * V)],
        "A": [(C + 2 * config.kv_width, C), (C, C)],
    }
    of_mlp = [((_mlp_matrices(config) - 1) * hidden, C), (C, hidden)]
    return [shape for letter in config.letters for shape in of_mixer[letter] + of_mlp]


def layers_by_letter(config: ModelConfig) -> dict[str, int]:
    """Number of layers of each mixer, {"T": …, "S": …, …}."""
    return {letter: config.letters.count(letter) for letter in MIXERS}


def flops_per_token(config: ModelConfig, tokens: int) -> FlopsPerToken:
    """FLOPs per token of training on documents of `tokens` tokens."""
    return FlopsPerToken(_products(config), _attention(config, tokens), _operator(config))


def _products(config: ModelConfig) -> Flops:
    layers, C = layers_by_letter(config), config.width
    mixers = layers["T"] * 2 * C**2 + layers["S"] * _slot_weights(config) + layers["A"] * _softmax_weights(config)
    weights = mixers + config.layers * mlp_weights(config) + config.vocab_size * C
    return Flops(2 * weights, 4 * weights)


def _attention(config: ModelConfig, tokens: int) -> Flops:
    window = min(config.window or tokens, tokens)
    seen = window - window * (window - 1) / (2 * tokens)
    forward = layers_by_letter(config)["A"] * 4 * config.width * seen
    return Flops(forward, 2 * forward)


def _operator(config: ModelConfig) -> Flops:
    C, H, layers = config.width, config.heads, layers_by_letter(config)
    mean, biased = config.membership == "energy-mean", config.denom_bias != "none"
    extra = H * (mean + biased * (1 if mean else 2))
    forward, backward = layers["T"] * (9 * C + 7 * H - 1 + extra), layers["T"] * (22 * C + 8 * H - 1 + extra)
    H_S, S, V = layers["S"] * H, config.slots, config.slot_channels
    forward += H_S * (5 * S * V + (13 + 2 * CONV_TAPS) * S - V - 2)
    backward += H_S * (11 * S * V + (18 + 4 * CONV_TAPS) * S - V - 2)
    return Flops(forward, backward)


def _softmax_weights(config: ModelConfig) -> int:
    """Numbers of the two projections of an A layer: queries, keys and values in, one output."""
    return 2 * config.width * (config.width + config.kv_width)


def _slot_weights(config: ModelConfig) -> int:
    """Numbers of the two projections of an S layer: two keys and two values in, one value out."""
    return config.width * config.heads * (2 * config.slots + 3 * config.slot_channels)


def _bias_numbers(config: ModelConfig) -> int:
    return {"position": config.heads * config.max_positions, "head": config.heads, "none": 0}[config.denom_bias]


# Dense TFLOP/s for each dtype, by words of the name from torch.cuda.get_device_name(). bfloat16 on tensor cores; data
# sheets print twice that "with sparsity". float32 without TF32, which torch disables by default. Sources: NVIDIA's data
# sheets of each product (B200: of HGX). The first row whose words are all in the name applies.
_PEAKS: list[tuple[set[str], dict[str, float]]] = [
    ({"GB200"}, {"bfloat16": 2500, "float32": 80}),
    ({"B200"}, {"bfloat16": 2250, "float32": 75}),
    ({"H200", "NVL"}, {"bfloat16": 835.5, "float32": 60}),
    ({"H200"}, {"bfloat16": 989.4, "float32": 66.9}),
    ({"GH200"}, {"bfloat16": 989.4, "float32": 66.9}),
    ({"H100", "PCIe"}, {"bfloat16": 756.5, "float32": 51.2}),
    ({"H100", "NVL"}, {"bfloat16": 835.5, "float32": 60}),
    ({"H100"}, {"bfloat16": 989.4, "float32": 66.9}),  # SXM: "NVIDIA H100 80GB HBM3"
    ({"A100"}, {"bfloat16": 312, "float32": 19.5}),
    ({"L40S"}, {"bfloat16": 362.05, "float32": 91.6}),
    ({"L40"}, {"bfloat16": 181.05, "float32": 90.5}),
    ({"L4"}, {"bfloat16": 121, "float32": 30.3}),
    ({"A40"}, {"bfloat16": 149.7, "float32": 37.4}),
    ({"A10"}, {"bfloat16": 125, "float32": 31.2}),
]


def peak_flops(device_name: str, dtype: Literal["float32", "bfloat16"]) -> float | None:
    """Published peak FLOP/s of dense products on a GPU; None for an unknown GPU or a slice of one (MIG)."""
    words = set(re.split(r"[\s-]+", device_name))
    if "MIG" in words:
        return None
    known = next((peaks for name, peaks in _PEAKS if name <= words), None)
    return None if known is None else known[dtype] * 1e12
