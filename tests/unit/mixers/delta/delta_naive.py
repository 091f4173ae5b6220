"""The gated delta rule as the formula is written, token by token: the reference of every faster form.

Source: Gated Delta Networks (arXiv 2412.06464). Shapes as in `tost_lm.mixers.delta`.
"""

from itertools import pairwise

import torch
from torch import Tensor

from tost_lm.ops.layout import LocalDocuments
from tost_lm.ops.precision import statistics_dtype


def delta_rule_naive(
    query_BThK: Tensor, key_BThK: Tensor, value_BTHV: Tensor, log_decay_BTH: Tensor, beta_BTH: Tensor, *,
    local: LocalDocuments, initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [B, T, H, V] and the final state [N, H, K, V] of documents that start from `initial_state`, or empty.

    Computed and returned in the statistics dtype of the values, differentiable by autograd.
    """
    dtype, H = statistics_dtype(value_BTHV), value_BTHV.shape[2]
    query, key, value, log_decay, beta = (
        x.flatten(0, 1).to(dtype) for x in (query_BThK, key_BThK, value_BTHV, log_decay_BTH, beta_BTH)
    )
    query, key = (x.repeat_interleave(H // x.shape[1], 1) for x in (query, key))
    if initial_state is None:
        initial_state = value.new_zeros(len(local.whole_lengths), H, key.shape[-1], value.shape[-1])
    ys, finals = [], []
    for state_HKV, (start, end) in zip(initial_state.to(dtype), pairwise(local.offsets), strict=True):
        for t in range(start, end):
            decayed_HKV = log_decay[t].view(H, -1, 1).exp() * state_HKV
            error_HV = value[t] - torch.einsum("hk,hkv->hv", key[t], decayed_HKV)
            state_HKV = decayed_HKV + torch.einsum("h,hk,hv->hkv", beta[t], key[t], error_HV)
            ys.append(torch.einsum("hk,hkv->hv", query[t], state_HKV))
        finals.append(state_HKV)
    return torch.stack(ys).view_as(value_BTHV), torch.stack(finals)
