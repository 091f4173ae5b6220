"""The gated mixer: gated linear attention (arXiv 2312.06635) on the kernels of flash-linear-attention, for GPUs.

It is the linear-time baseline. Its state is a matrix per head that tokens write and read by key, C²/(2·H) numbers a
layer.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu

from tost_lm.errors import ConfigError, install_hint
from tost_lm.model.config import GATE_CHANNELS, ModelConfig
from tost_lm.model.positions import SequenceInfo, state_rows
from tost_lm.ops.layout import int64_tensor
from tost_lm.ops.registered import Registered

GATE_TEMPERATURE = 16.0
RECURRENT_TOKENS = 64
"""Documents up to this length use the recurrent kernel, longer documents the chunked kernel."""


class GatedState(NamedTuple):
    """The decayed sum of outer products of earlier keys and values, [N, H, K, D] in float32."""

    memory: Tensor


class GatedMixer(nn.Module):
    """S_t = diag(α_t)·S_{t−1} + k_tᵀ·v_t and o_t = q_t·S_t/√K in each head, α = sigmoid(…)^(1/16); K = D/2 channels of
    q and k, D of v. The o of each head is normalized and gated by silu(r) (sections 4.1 and 4.4)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, self.heads = config.width, config.heads
        self.channels = [C // 2, C // 2, C, C]
        self.in_proj = nn.Linear(C, sum(self.channels), bias=config.bias)
        self.gate_in = nn.Linear(C, GATE_CHANNELS, bias=False)
        self.gate_out = nn.Linear(GATE_CHANNELS, C // 2)
        self.norm = nn.RMSNorm(C // config.heads, eps=1e-5)
        self.out_proj = nn.Linear(C, C, bias=config.bias)

    def forward(self, x_BTC: Tensor, state: GatedState | None, info: SequenceInfo) -> tuple[Tensor, GatedState | None]:
        """Mix the tokens, given the state after earlier tokens.

        Raises:
            ConfigError: x is not on a GPU, sequences are split over ranks, or flash-linear-attention is not installed.
        """
        q, k, v, r = self.in_proj(x_BTC).split(self.channels, -1)
        gate = logsigmoid(self.gate_out(self.gate_in(x_BTC)).float()) / GATE_TEMPERATURE
        q, k, v, gate = (x.unflatten(-1, (self.heads, -1)) for x in (q, k, v, gate))
        tensors = [q, k, v, gate, state.memory if state else None, info.state_offsets]
        o_BTHD, *memory = ATTENTION(info, info.handle, tensors, info.wanted_state)
        y_BTC = self.norm(o_BTHD).flatten(-2) * silu(r)
        return self.out_proj(y_BTC), GatedState(*memory) if memory else None


def _attend(info: SequenceInfo, tensors: Sequence[Any], _wanted: str) -> list[Tensor]:
    q, k, v, gate, memory, _ = tensors
    chunked, recurrent = gated_kernels(q.device)
    if info.shard is not None:
        raise ConfigError("G layers of model.pattern do not support sequence ranks; set parallel.sequence=1")
    attend = recurrent if max(info.local.lengths) <= RECURRENT_TOKENS else chunked
    o_BTHD, memory = attend(
        q, k, v, gate,
        initial_state=info.pad_rows(memory),
        output_final_state=bool(info.output_state),
        cu_seqlens=int64_tensor(info.local.offsets, q.device) if info.local.packed else None,
    )  # fmt: skip
    return [o_BTHD, info.select_rows(memory)] if info.output_state else [o_BTHD]


def _fake(tensors: Sequence[Any], wanted_state: str) -> list[Tensor]:
    _, k, v, *_, offsets = tensors
    o_BTHD, (B, _, H, D) = v.new_empty(v.shape), v.shape
    shape = state_rows(B, offsets), H, k.shape[-1], D
    return [o_BTHD, v.new_empty(shape, dtype=torch.float32)] if wanted_state else [o_BTHD]


ATTENTION = Registered("gated_linear_attention", _attend, _fake)


def gated_kernels(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The chunked and the recurrent kernel of flash-linear-attention.

    Raises:
        ConfigError: `device` is not a GPU, or flash-linear-attention is not installed.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"G layers of model.pattern run on a GPU only, not on {device.type}; use T and A layers")
    try:
        from fla.ops.gla import chunk_gla, fused_recurrent_gla
    except ImportError as e:
        raise ConfigError(f"G layers of model.pattern need flash-linear-attention: {e}; {install_hint('gla')}") from e
    return chunk_gla, fused_recurrent_gla
