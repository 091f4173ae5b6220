"""The published formulas (arXiv 2412.17810, released causal form) in plain loops, token by token.

They share no code with `tost_lm.ops` and use no cumulative sums.
"""

import torch
from torch import Tensor


def causal_tssa_by_loops(w_BTHD: Tensor, temp_H: Tensor, bias_HT: Tensor) -> Tensor:
    B, T, H, D = w_BTHD.shape
    outputs = []
    for b in range(B):
        rows = []
        pi_so_far: list[Tensor] = []
        for t in range(T):
            past_tHD = w_BTHD[b, : t + 1]
            energy_HD = past_tHD.pow(2).sum(0).clamp_min(1e-12)
            z_H = torch.stack(
                [temp_H[h] * sum(w_BTHD[b, t, h, d] ** 2 / energy_HD[h, d] + bias_HT[h, t] for d in range(D))
                 for h in range(H)]
            )  # fmt: skip
            pi_H = z_H.exp() / z_H.exp().sum()
            pi_so_far.append(pi_H)
            pi_tH = torch.stack(pi_so_far)
            moment_HD = (pi_tH[..., None] * past_tHD**2).sum(0) / (pi_tH.sum(0) + 1e-8)[:, None]
            rows.append(-pi_H[:, None] * w_BTHD[b, t] / (1 + moment_HD))
        outputs.append(torch.stack(rows))
    return torch.stack(outputs)
