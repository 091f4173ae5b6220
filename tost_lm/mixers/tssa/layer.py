"""The TSSA mixer: one projection in, token statistics, one projection out (arXiv 2412.17810, released form)."""

import torch
from torch import Tensor, nn

from tost_lm.mixers.layer import HeadSoftmax, TokenMixer
from tost_lm.mixers.tssa.causal import causal_tssa, tssa_step
from tost_lm.mixers.tssa.settings import TssaShape
from tost_lm.mixers.tssa.statistics import TssaState
from tost_lm.ops.initialization import InitialValue, set_own_constants
from tost_lm.ops.positions import SequenceInfo


class TssaMixer(TokenMixer):
    State = TssaState
    OF_HEADS = ("temp", "denom_bias")
    FIXED_STATE = True

    def __init__(self, shape: TssaShape):
        super().__init__()
        self.heads = shape.heads
        self.in_proj = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.out_proj = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.temp = nn.Parameter(torch.empty(shape.heads))
        shapes = {"position": (shape.heads, shape.max_positions), "head": (shape.heads,)}
        of_bias = shapes.get(shape.own.denom_bias)
        self.denom_bias = nn.Parameter(torch.empty(of_bias)) if of_bias else None
        set_own_constants(self)
        self.softmax: HeadSoftmax | None = None
        """The softmax over the heads of all tensor ranks; None: all heads are on this rank."""

    def initial_values(self) -> dict[str, InitialValue]:
        return {"temp": 1.0, "denom_bias": 0.0}

    def split_heads(self, ranks: int, softmax: HeadSoftmax) -> None:
        self.softmax = softmax
        super().split_heads(ranks, softmax)

    def forward(self, x_BTC: Tensor, state: TssaState | None, info: SequenceInfo) -> tuple[Tensor, TssaState | None]:
        """Mix the tokens, given the statistics of earlier tokens. One token per document uses the recurrent form."""
        w_BTHD = self.in_proj(x_BTC).unflatten(-1, (self.heads, -1))
        y_BTHD, state = self.eager(_mix, info, w_BTHD, self.temp, self.denom_bias, state, self.softmax)
        return self.out_proj(y_BTHD.flatten(-2)), state


MIXER = TssaMixer


def bias_of(denom_bias: Tensor | None, info: SequenceInfo) -> Tensor | None:
    """denom_bias, [H] or [H, positions], of each token: [H, T], or [B, H, T] where rows have different positions."""
    if denom_bias is None:
        return None
    T = info.position.shape[-1]
    if denom_bias.dim() == 1:
        return denom_bias[:, None].expand(-1, T)
    if info.cu_seqlens is None and info.position.dim() == 1:
        first = info.start_positions[0] + info.local.before[0]
        return denom_bias[:, first : first + T]
    return denom_bias[:, info.position].movedim(0, -2)


def _mix(
    info: SequenceInfo,
    w_BTHD: Tensor,
    temp_H: Tensor,
    denom_bias: Tensor | None,
    state: TssaState | None,
    softmax: HeadSoftmax | None,
) -> tuple[Tensor, TssaState | None]:
    bias = bias_of(denom_bias, info)
    state = state and TssaState(*map(info.pad_rows, state))  # pyright: ignore[reportArgumentType]
    if state is not None and info.recurrent:
        if bias is not None:
            bias = bias[..., 0] if info.cu_seqlens is None else bias.T
        y_NHD, state = tssa_step(w_BTHD.flatten(0, 1), temp_H, bias, state, heads=softmax)
        y_BTHD = y_NHD.view_as(w_BTHD)
    else:
        y_BTHD, state = causal_tssa(
            w_BTHD, temp_H, bias, initial_state=state,
            output_final_state=bool(info.output_state), cu_seqlens=info.cu_seqlens, shard=info.shard, heads=softmax,
        )  # fmt: skip
    return y_BTHD, TssaState(*map(info.select_rows, state)) if state and info.output_state else None
