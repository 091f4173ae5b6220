"""Mixers of an encoder, in which a token reads its whole document. They have no state: it is None.

Shapes: B rows, T tokens, C channels, H heads, D channels per head, K taps of a convolution.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from tost_lm.model.config import CONV_TAPS, ModelConfig
from tost_lm.model.initialization import InitialValue, set_own_constants
from tost_lm.model.positions import SequenceInfo
from tost_lm.model.slots import SlotMixer
from tost_lm.model.softmax import KeyValueState, SoftmaxMixer
from tost_lm.model.tssa import TssaMixer
from tost_lm.ops import TssaState, tssa
from tost_lm.ops.layout import int64_tensor
from tost_lm.ops.slots import short_conv


class BidirectionalTssa(TssaMixer):
    """Bidirectional TSSA (arXiv 2412.17810)."""

    def forward(self, x_BTC: Tensor, state: TssaState | None, info: SequenceInfo) -> tuple[Tensor, None]:
        w_BTHD = self.in_proj(x_BTC).unflatten(-1, (self.heads, -1))
        y_BTHD = tssa(w_BTHD, self.temp, cu_seqlens=info.cu_seqlens, heads=self.softmax)
        return self.out_proj(y_BTHD.flatten(-2)), None


class BidirectionalSoftmax(SoftmaxMixer):
    """Softmax attention of all tokens of a document, by torch's kernels."""

    def forward(self, x_BTC: Tensor, state: KeyValueState | None, info: SequenceInfo) -> tuple[Tensor, None]:
        qkv = self.project(x_BTC, info)
        if info.cu_seqlens is None:
            y_BHTD = scaled_dot_product_attention(*qkv)
        else:
            documents = zip(*(x.split(info.local.lengths, 2) for x in qkv), strict=True)
            y_BHTD = torch.cat([scaled_dot_product_attention(*document) for document in documents], 2)
        return self.out_proj(y_BHTD.transpose(1, 2).flatten(-2)), None


class BidirectionalSlots(nn.Module):
    """Slot memory in both directions: half of the heads read a document from its start, the others from its end."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        half = config.model_copy(update={"heads": config.heads // 2})
        self.from_start, self.from_end = SlotMixer(half), SlotMixer(half)

    def forward(self, x_BTC: Tensor, state: None, info: SequenceInfo) -> tuple[Tensor, None]:
        y_BTC, _ = self.from_start(x_BTC, None, info)
        backwards_BTC, _ = self.from_end(reverse(x_BTC, info), None, info)
        return y_BTC + reverse(backwards_BTC, info), None


class NoMixer(nn.Module):
    """A layer of each token alone, W₂·silu(W₁·x): the control of `BidirectionalConvolution`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.in_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.out_proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x_BTC: Tensor, state: None, info: SequenceInfo) -> tuple[Tensor, None]:
        return self.out_proj(silu(self.mix(self.in_proj(x_BTC), info))), None

    def mix(self, x_BTC: Tensor, info: SequenceInfo) -> Tensor:
        return x_BTC


class BidirectionalConvolution(NoMixer):
    """W₂·silu(conv(W₁·x)): a token reads itself and K − 1 tokens on each side, channel by channel. The convolution
    begins with what a token reads of itself."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        shape = config.heads, config.width // config.heads, CONV_TAPS
        self.from_start, self.from_end = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        set_own_constants(self)

    def initial_values(self) -> dict[str, InitialValue]:
        taps = torch.zeros(self.from_start.shape, device="cpu")
        taps[..., -1] = 0.5
        return {"from_start": taps, "from_end": taps}

    def mix(self, x_BTC: Tensor, info: SequenceInfo) -> Tensor:
        y_BTC, _ = short_conv(x_BTC, self.from_start.flatten(0, 1), local=info.local)
        backwards_BTC, _ = short_conv(reverse(x_BTC, info), self.from_end.flatten(0, 1), local=info.local)
        return y_BTC + reverse(backwards_BTC, info)


def reverse(x_BTC: Tensor, info: SequenceInfo) -> Tensor:
    """The tokens of each document in reverse order."""
    if info.cu_seqlens is None:
        return x_BTC.flip(1)
    return x_BTC[:, int64_tensor(_reversed(info.local.offsets), x_BTC.device)]


def _reversed(offsets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for start, end in pairwise(offsets) for i in reversed(range(start, end)))
