"""Mixers of an encoder, in which a token reads its whole document. They have no state: it is None."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tost_lm.model.positions import SequenceInfo
from tost_lm.model.softmax import KeyValueState, SoftmaxMixer
from tost_lm.model.tssa import TssaMixer
from tost_lm.ops import TssaState, tssa


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
