"""Parameters and floating-point operations (FLOPs) of a model, counted from its settings; peak FLOP/s of GPUs.

An operation is an addition, subtraction, multiplication, division or exponential. A product of matrices of M×K and K×N
has 2·M·K·N. Counted: the products of the linear layers and the head, 2 forward for each token and weight and twice that
backward, and what each mixer counts of itself (`tost_lm/mixers/*/spec.py`), or the products of matrices that a plugin
runs. Not counted: norms, gates of outputs, GELU
or SwiGLU, LayerScale, rotary embedding, the softmax of attention, the loss, the optimizer, and recomputation in the
backward (sums over time in TSSA, scores in attention).
"""

import re
from collections.abc import Callable
from functools import cache
from itertools import chain
from math import prod
from typing import Literal, NamedTuple

from tost_lm.mixers.registry import SPECS
from tost_lm.mixers.spec import Flops
from tost_lm.model.config import ModelConfig


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


class FlopsPerToken(NamedTuple):
    """FLOPs per token of the whole model, by kind."""

    products: Flops
    attention: Flops
    operator: Flops

    @property
    def total(self) -> float:
        return sum(kind.total for kind in self)


class Weight(NamedTuple):
    """A parameter of a tensor rank."""

    component: str
    """A field of `Parameters`."""
    rows: int
    """Its first dimension."""
    columns: int = 1
    """Numbers in a row."""
    replicated: bool = False
    """Whether every tensor rank has it whole."""

    @property
    def size(self) -> int:
        return self.rows * self.columns


def parameters(config: ModelConfig) -> Parameters:
    blocks = {letter: block_weights(config, letter) for letter in set(config.letters)}
    counts = dict.fromkeys(Parameters._fields, 0)
    for weight in chain(end_weights(config), *(blocks[letter] for letter in config.letters)):
        counts[weight.component] += weight.size
    return Parameters(**counts)


def end_weights(config: ModelConfig, tensor: int = 1) -> list[Weight]:
    """Those outside the blocks on one of `tensor` ranks: the embedding, positions, the last norm, and the head's."""
    table = Weight("embedding", config.vocab_size // tensor, config.width)
    positions = [Weight("positions", config.max_positions, config.width, replicated=True)]
    learned = positions if config.positions == "learned" else []
    return [table, *learned, *_norm_weights(config), *([] if config.tied_head else [table])]


def block_weights(config: ModelConfig, letter: str, tensor: int = 1) -> list[Weight]:
    """Those of a block with this mixer on one of `tensor` ranks."""
    C, own = config.width, SPECS[letter].numbers(config.shape_of(letter))
    scale = Weight("scales", C, replicated=True)
    return [
        *_linear_weights(config, "mixers", own.channels_in, own.channels_out, tensor),
        *(Weight("mixers", rows // tensor, prod(others)) for rows, *others in own.split),
        *(Weight("scales", rows, prod(others), replicated=True) for rows, *others in own.replicated),
        *_linear_weights(config, "mlps", (_mlp_matrices(config) - 1) * config.mlp_width, config.mlp_width, tensor),
        *(2 * _norm_weights(config)),
        *(2 * [scale] if config.layer_scale else []),
    ]


def _linear_weights(config: ModelConfig, component: str, into: int, out: int, tensor: int) -> list[Weight]:
    """From the residual stream into so many channels, and from so many back."""
    C = config.width
    matrices = [Weight(component, into // tensor, C), Weight(component, C, out // tensor)]
    biases = [Weight(component, into // tensor), Weight(component, C, replicated=True)]
    return matrices + (biases if config.bias else [])


def _norm_weights(config: ModelConfig) -> list[Weight]:
    return (1 + (config.bias and config.norm == "layer")) * [Weight("scales", config.width, replicated=True)]


def mlp_weights(config: ModelConfig) -> int:
    """Numbers of the matrices of an MLP."""
    return _mlp_matrices(config) * config.width * config.mlp_width


def _mlp_matrices(config: ModelConfig) -> int:
    """Matrices of width × mlp_width in an MLP: into each tensor of its hidden channels, and out."""
    return 3 if config.mlp == "swiglu" else 2


def block_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """Rows and columns of the weights of all linear layers, those of mixers and MLPs."""
    C, hidden = config.width, config.mlp_width
    of_mlp = [((_mlp_matrices(config) - 1) * hidden, C), (C, hidden)]
    shapes = []
    for letter in config.letters:
        numbers = SPECS[letter].numbers(config.shape_of(letter))
        shapes += [(numbers.channels_in, C), (C, numbers.channels_out), *of_mlp]
    return shapes


def flops_per_token(config: ModelConfig, tokens: int) -> FlopsPerToken:
    """FLOPs per token of training on documents of `tokens` tokens."""
    used = [(config.letters.count(spec.letter), spec, shape) for spec, shape in config.mixers]
    attention, operator = (
        _sum([(layers, spec.flops(shape, tokens)[kind]) for layers, spec, shape in used]) for kind in (0, 1)
    )
    mixers = sum(layers * spec.weights(shape) for layers, spec, shape in used)
    weights = mixers + config.layers * mlp_weights(config) + config.vocab_size * config.width
    return FlopsPerToken(Flops(2 * weights, 4 * weights), attention, operator)


def document_flops(config: ModelConfig) -> Callable[[int], float]:
    """FLOPs of training on a document of so many tokens; each length is counted once."""
    return cache(lambda tokens: tokens * flops_per_token(config, tokens).total)


def _sum(of_layers: list[tuple[int, Flops]]) -> Flops:
    return Flops(sum(n * one.forward for n, one in of_layers), sum(n * one.backward for n, one in of_layers))


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
