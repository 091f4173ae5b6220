"""RMSNorm whose weight is near 0."""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from tost_lm.ops.initialization import InitialValue


class ZeroCenteredRmsNorm(nn.RMSNorm):
    """RMSNorm that multiplies with 1 + its weight. Near 0, a weight in bfloat16 is more precise than near 1."""

    def initial_values(self) -> dict[str, InitialValue]:
        return {"weight": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        y = rms_norm(x, self.normalized_shape, eps=self.eps)
        return torch.addcmul(y, y, self.weight.to(y.dtype))
