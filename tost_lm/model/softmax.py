"""The baseline's mixer: causal softmax attention as in GPT-2."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tost_lm.model.config import ModelConfig


class KeyValueState(NamedTuple):
    """Keys and values of all earlier tokens, each [B, H, T, D]: unlike TSSA's state it grows with T."""

    key: Tensor
    value: Tensor


class SoftmaxMixer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.in_proj = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out_proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x_BTC: Tensor, state: KeyValueState | None, position: int) -> tuple[Tensor, KeyValueState]:
        """Attend to the tokens so far; `position` is the number of tokens in `state`."""
        q, k, v = self.in_proj(x_BTC).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if state is None:
            y_BHTD = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = torch.cat([state.key, k], 2), torch.cat([state.value, v], 2)
            mask_TS = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(position)
            y_BHTD = scaled_dot_product_attention(q, k, v, attn_mask=mask_TS)
        return self.out_proj(y_BHTD.transpose(1, 2).flatten(-2)), KeyValueState(k, v)
