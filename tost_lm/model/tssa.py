"""The TSSA mixer: one projection in, token statistics, one projection out (arXiv 2412.17810, released form)."""

import torch
from torch import Tensor, nn

from tost_lm.model.config import ModelConfig
from tost_lm.model.positions import SequenceInfo
from tost_lm.ops import Membership, TssaState, causal_tssa, tssa_step
from tost_lm.ops.phases import HeadSoftmax


class TssaMixer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.membership: Membership = config.membership
        self.in_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.out_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.temp = nn.Parameter(torch.ones(config.heads))
        shapes = {"position": (config.heads, config.max_positions), "head": (config.heads,)}
        shape = shapes.get(config.denom_bias)
        self.denom_bias = nn.Parameter(torch.zeros(shape)) if shape else None
        self.softmax: HeadSoftmax | None = None
        """The softmax over the heads of all tensor ranks; None: all heads are on this rank."""

    def forward(self, x_BTC: Tensor, state: TssaState | None, info: SequenceInfo) -> tuple[Tensor, TssaState | None]:
        """Mix the tokens, given the statistics of earlier tokens. One token per document uses the recurrent form."""
        w_BTHD = self.in_proj(x_BTC).unflatten(-1, (self.heads, -1))
        bias = self.bias_of(info)
        state = info.pad_state(state)
        if state is not None and max(info.local.lengths) == 1 and info.shard is None:
            if bias is not None:
                bias = bias[..., 0] if info.cu_seqlens is None else bias.T
            y_NHD, state = tssa_step(
                w_BTHD.flatten(0, 1), self.temp, bias, state, membership=self.membership, heads=self.softmax
            )
            y_BTHD = y_NHD.view_as(w_BTHD)
        else:
            y_BTHD, state = causal_tssa(
                w_BTHD, self.temp, bias, membership=self.membership, initial_state=state,
                output_final_state=bool(info.output_state), cu_seqlens=info.cu_seqlens, shard=info.shard,
                heads=self.softmax,
            )  # fmt: skip
        return self.out_proj(y_BTHD.flatten(-2)), None if state is None else info.select_state(state)

    def bias_of(self, info: SequenceInfo) -> Tensor | None:
        """denom_bias of each token: [H, T], or [B, H, T] where rows have different positions."""
        if self.denom_bias is None:
            return None
        if self.denom_bias.dim() == 1:
            return self.denom_bias[:, None].expand(-1, info.position.shape[-1])
        return self.denom_bias[:, info.position].movedim(0, -2)
