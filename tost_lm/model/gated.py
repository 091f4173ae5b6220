"""The gated mixer: gated linear attention (arXiv 2312.06635) on the kernels of flash-linear-attention, for GPUs.

Linear in time like TSSA, but its state is a matrix per head that tokens write to and read from by key, C²/(2·H) numbers
a layer: the linear-time baseline beside T and A layers.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu

from tost_lm.errors import ConfigError
from tost_lm.model.config import GATE_CHANNELS, ModelConfig
from tost_lm.model.positions import Places

GATE_TEMPERATURE = 16.0
RECURRENT_TOKENS = 64
"""Documents of up to so many go token by token, longer ones in chunks."""


class GatedState(NamedTuple):
    """What keys and values of earlier tokens have left, [N, H, K, D] in float32."""

    memory: Tensor


class GatedMixer(nn.Module):
    """S_t = diag(α_t)·S_{t−1} + k_tᵀ·v_t and o_t = q_t·S_t/√K in each head, α = sigmoid(…)^(1/16); K = D/2 channels of
    q and k, D of v. Each head's o is normed and gated by silu(r) (sections 4.1 and 4.4)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, self.heads = config.width, config.heads
        self.channels = [C // 2, C // 2, C, C]
        self.in_proj = nn.Linear(C, sum(self.channels), bias=config.bias)
        self.gate_in = nn.Linear(C, GATE_CHANNELS, bias=False)
        self.gate_out = nn.Linear(GATE_CHANNELS, C // 2)
        self.norm = nn.RMSNorm(C // config.heads, eps=1e-5)
        self.out_proj = nn.Linear(C, C, bias=config.bias)

    def forward(self, x_BTC: Tensor, state: GatedState | None, places: Places) -> tuple[Tensor, GatedState | None]:
        """Mix the tokens, given what is left of those before them; recurrently if they are few.

        Raises:
            ConfigError: x lies on no GPU or its sequences on several ranks, or flash-linear-attention is not installed.
        """
        kernels = gated_kernels(x_BTC.device)
        if places.shard is not None:
            raise ConfigError("G layers of model.pattern cannot share sequences out: set parallel.sequence = 1")
        q, k, v, r = self.in_proj(x_BTC).split(self.channels, -1)
        gate = logsigmoid(self.gate_out(self.gate_in(x_BTC)).float()) / GATE_TEMPERATURE
        q, k, v, gate = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v, gate))
        state = places.with_all_documents(state)
        attend = kernels.recurrently if max(places.lengths) <= RECURRENT_TOKENS else kernels.in_chunks
        o_BTHD, memory = attend(
            q, k, v, gate,
            initial_state=None if state is None else state.memory,
            output_final_state=bool(places.output_state),
            cu_seqlens=None if places.cu_seqlens is None else places.cu_seqlens.to(x_BTC.device),
        )  # fmt: skip
        y_BTC = self.norm(o_BTHD).flatten(-2) * silu(r)
        return self.out_proj(y_BTC), places.wanted(GatedState(memory)) if places.output_state else None


class GatedKernels(NamedTuple):
    in_chunks: Callable[..., Any]
    recurrently: Callable[..., Any]


def gated_kernels(device: torch.device) -> GatedKernels:
    """Those of flash-linear-attention.

    Raises:
        ConfigError: `device` is no GPU, or they are not installed.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("G layers of model.pattern run on a GPU only: use T and A layers here")
    try:
        from fla.ops.gla import chunk_gla, fused_recurrent_gla
    except ImportError as e:
        raise ConfigError(
            f"G layers of model.pattern need flash-linear-attention ({e}): pip install 'tost-lm[gla]'"
        ) from e
    return GatedKernels(chunk_gla, fused_recurrent_gla)
