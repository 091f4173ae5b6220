"""The delta layer: projections, short convolutions, the gated delta rule, and a gated norm.

Sources: arXiv 2412.06464 and its released layer. Shapes as in `tost_lm.mixers.delta`; G = H / h value heads of a key
head, E = h·(2K + G·V) channels that are convolved.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import rms_norm, silu, softplus

from tost_lm.mixers.delta.fla import missing_in_training
from tost_lm.mixers.delta.operator import FiniteDecay, delta_rule, delta_rule_step
from tost_lm.mixers.delta.settings import CONV_TAPS, DeltaShape, DeltaSizes
from tost_lm.mixers.layer import HeadSoftmax, TokenMixer
from tost_lm.ops.initialization import InitialValue, Normal, set_own_constants
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.precision import statistics_dtype
from tost_lm.ops.short_conv import conv_of

LARGEST_RATE = 16.0
SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1
UNIT_EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


class DeltaState(NamedTuple):
    """The state of a delta layer after some tokens; zeros before the first one."""

    memory: Tensor
    """S, [N, H, K, V], in the dtype of running sums."""
    taps: Tensor
    """The last tokens before the convolution, [N, CONV_TAPS − 1, E]: queries and keys of all heads, then values."""


class DeltaMixer(TokenMixer):
    """A state per value head, which forgets at a rate and is corrected with a strength that depend on the token.

    The rows of `in_proj` are those of one key head after the other: its query, its key, the values and the output gates
    of its value heads, their write strengths, and their decays, one for each head or for each channel of its key. Those
    of `conv` likewise: query, key, values.
    """

    State = DeltaState
    OF_HEADS = ("conv", "log_rate", "step_bias")
    FIXED_STATE = True

    def __init__(self, shape: DeltaShape):
        super().__init__()
        self.key_heads, self.heads, self.key_size, self.value_size = h, H, K, V = DeltaSizes.of(shape)
        self.strength, group, width = 2 if shape.own.beta_to_two else 1, H // h, shape.width
        self.norm_epsilon, self.of_channels = shape.own.norm_epsilon, shape.own.decay_per_channel
        self.sizes = [2 * K + group * V, group * V, group, K if self.of_channels else group]
        self.in_proj = nn.Linear(width, h * sum(self.sizes), bias=shape.bias)
        self.out_proj = nn.Linear(H * V, width, bias=shape.bias)
        taps = torch.empty(h * self.sizes[0], CONV_TAPS)
        self.conv = nn.Parameter(taps.uniform_(-(CONV_TAPS**-0.5), CONV_TAPS**-0.5))
        self.log_rate = nn.Parameter(torch.empty(H))
        self.step_bias = nn.Parameter(torch.empty(H * K if self.of_channels else H))  # a vector: no weight decay
        self.norm = nn.Parameter(torch.empty(V))
        set_own_constants(self)

    def initial_values(self) -> dict[str, InitialValue]:
        log_rate, step_bias = initial_decays(self.heads, len(self.step_bias) // self.heads)
        return {"conv": Normal(conv_std()), "log_rate": log_rate, "step_bias": step_bias, "norm": 1.0}

    def forward(self, x_BTC: Tensor, state: DeltaState | None, info: SequenceInfo) -> tuple[Tensor, DeltaState | None]:
        """Mix the tokens, given the state after earlier tokens. One token per document uses the recurrent form."""
        projected = self.in_proj(x_BTC).unflatten(-1, (self.key_heads, -1))
        tokens, gate, beta, step = projected.split(self.sizes, -1)
        parts, K, heads = [2 * self.key_size, self.sizes[1]], self.key_size, (self.heads, self.value_size)
        xs = [x.flatten(-2) for x in tokens.split(parts, -1)]
        conv = self.conv.to(statistics_dtype(self.conv))  # here, where a compiled graph casts it and its gradient
        weights = [x.flatten(0, 1) for x in conv.unflatten(0, (self.key_heads, -1)).split(parts, 1)]
        (keys_BTE, value_BTE), taps = self.eager(conv_of, info, xs, weights, state.taps if state else None, True)
        query, key = keys_BTE.unflatten(-1, (self.key_heads, -1)).chunk(2, -1)
        log_decay, beta_BTH = self.rates(step.flatten(-2), beta.flatten(-2))
        query, key, value = unit_length(query, scale=K**-0.5), unit_length(key), value_BTE.unflatten(-1, heads)
        memory = state.memory if state else None
        y_BTHV, memory = self.eager(_delta_rule, info, query, key, value, log_decay, beta_BTH, memory)
        y_BTHV = rms_norm(y_BTHV, heads[1:], eps=self.norm_epsilon) * self.norm
        gate_BTHV = gate.flatten(-2).unflatten(-1, heads)  # a copy: a view would keep all that is projected
        y_BTHV = y_BTHV * (gate_BTHV.sigmoid() if self.of_channels else silu(gate_BTHV))
        return self.out_proj(y_BTHV.flatten(-2)), DeltaState(memory, taps) if taps is not None else None

    def rates(self, step: Tensor, beta_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """log α, [B, T, H] or [B, T, H, K], and β of the tokens, in the statistics dtype, from as many steps."""
        dtype = statistics_dtype(step)
        with torch.autocast(step.device.type, enabled=False):
            rate, step = -self.log_rate.to(dtype).exp(), softplus(step.to(dtype) + self.step_bias.to(dtype))
            log_decay = rate[:, None] * step.unflatten(-1, (self.heads, -1)) if self.of_channels else rate * step
            return FiniteDecay.apply(log_decay), self.strength * beta_BTH.to(dtype).sigmoid()

    def split_heads(self, ranks: int, softmax: HeadSoftmax) -> None:
        super().split_heads(ranks, softmax)
        self.key_heads //= ranks

    def missing_kernels(self) -> str | None:
        device = self.in_proj.weight.device
        sizes = DeltaSizes(self.key_heads, self.heads, self.key_size, self.value_size)
        return missing_in_training(device, sizes, self.of_channels) if device.type == "cuda" else None


MIXER = DeltaMixer


def unit_length(x_BThK: Tensor, scale: float = 1) -> Tensor:
    """`scale` · x / ‖x‖, in the statistics dtype; on CUDA devices rounded to the dtype of x, as the kernels take it."""
    with torch.autocast(x_BThK.device.type, enabled=False):
        wide_BThK = x_BThK.to(statistics_dtype(x_BThK))
        length_BTh1 = vector_norm(wide_BThK, dim=-1, keepdim=True)
        unit_BThK = wide_BThK * (scale * (length_BTh1.square() + UNIT_EPSILON).rsqrt())
        return unit_BThK.to(x_BThK.dtype) if x_BThK.is_cuda else unit_BThK


def conv_std() -> float:
    """The standard deviation of uniform draws from ±1/√CONV_TAPS, those of torch's convolutions."""
    return (3 * CONV_TAPS) ** -0.5


def initial_decays(heads: int, channels: int = 1) -> tuple[Tensor, Tensor]:
    """log of the rates, [H], and biases of the steps before the softplus, for each channel of each head in turn.

    As published, rates are uniform between 0 and 16 and the logarithms of steps between those of 0.001 and 0.1; here
    evenly spread over the heads, and paired so that slow and fast rates have short and long steps.
    """
    spread = lambda count: torch.arange(count, dtype=torch.float64, device="cpu") + 0.5
    rate_H = LARGEST_RATE * spread(heads) / heads
    share = (spread(heads * channels) * (math.sqrt(5) - 1) / 2) % 1
    step = SHORTEST_STEP * (LONGEST_STEP / SHORTEST_STEP) ** share
    return rate_H.log(), step.expm1().log()


def _delta_rule(
    info: SequenceInfo,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    memory = info.pad_rows(memory)
    if memory is not None and info.recurrent:
        query, key, value_NHV, log_decay, beta = (x.flatten(0, 1) for x in (query, key, value, log_decay, beta))
        y_NHV, memory = delta_rule_step(query, key, value_NHV, log_decay, beta, memory)
        y_BTHV = y_NHV.view_as(value)
    else:
        y_BTHV, memory = delta_rule(
            query, key, value, log_decay, beta, local=info.local, initial_state=memory,
            output_final_state=bool(info.output_state), shard=info.shard,
        )  # fmt: skip
    return y_BTHV, info.select_rows(memory) if memory is not None and info.output_state else None
