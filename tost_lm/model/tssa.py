"""The TSSA mixer: one projection in, token statistics, one projection out (arXiv 2412.17810, released form)."""

import torch
from torch import Tensor, nn

from tost_lm.model.config import ModelConfig
from tost_lm.ops import TssaState, causal_tssa


class TssaMixer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.in_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.out_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.temp = nn.Parameter(torch.ones(config.heads))
        self.denom_bias = nn.Parameter(torch.zeros(config.heads, config.max_positions))

    def forward(self, x_BTC: Tensor, state: TssaState | None, position: int) -> tuple[Tensor, TssaState]:
        """Mix tokens that stand at `position` onwards, given the statistics of those before them."""
        w_BTHD = self.in_proj(x_BTC).unflatten(-1, (self.heads, -1))
        bias_HT = self.denom_bias[:, position : position + x_BTC.shape[1]]
        y_BTHD, state = causal_tssa(w_BTHD, self.temp, bias_HT, initial_state=state, output_final_state=True)
        assert state is not None
        return self.out_proj(y_BTHD.flatten(-2)), state
