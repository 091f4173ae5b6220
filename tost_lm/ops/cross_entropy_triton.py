"""The loss in Triton, for NVIDIA GPUs: a tile of logits becomes its loss and, in place, its gradient.

A program computes one token: it reads the logits for their maximum and log-sum-exp, and again to write the gradient.
With the vocabulary on several ranks, ranks combine their log-sum-exps between the two, in two launches.

Bytes that move for each bfloat16 logit of V entries and C channels: the head's product writes 2, the kernel reads 2 + 2
and writes 2, the products for the gradients of x and of the weight read 2 + 2. Adding a tile's gradient of the weight
to the float32 sum moves 12 for each element, 12·C/m for each logit of m tokens: 0.9 at C = 768, V = 50,304 and tiles of
2³⁰ bytes. That is 12.9, where operations of PyTorch on float32 copies move about 50.

Shapes: m tokens of a tile, V vocabulary entries on this rank.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits at once."""
WARPS = 8
LOWEST = tl.constexpr(-3.4e38)  # −inf − (−inf) would be NaN


def log_sums(logits_mV: Tensor, row_m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log-sum-exp, the label's logit (0 if its row is not one of V) and the largest logit of each token, float32."""
    log_sum_m, label_m, largest_m = _empty(row_m)
    _launch(logits_mV, row_m, row_m, log_sum_m, label_m, largest_m, 0.0, STATISTICS=True, GRADIENT=False)
    return log_sum_m, label_m, largest_m


def gradient_(logits_mV: Tensor, row_m: Tensor, counted_m: Tensor, log_sum_m: Tensor, z_loss: float) -> None:
    """(1 + 2·z_loss·log-sum-exp)·softmax − one-hot of each counted token, 0 of the others, over `logits_mV`."""
    _launch(logits_mV, row_m, counted_m, log_sum_m, log_sum_m, log_sum_m, z_loss, STATISTICS=False, GRADIENT=True)


def log_sums_and_gradient_(logits_mV: Tensor, row_m: Tensor, counted_m: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """log-sum-exp and the label's logit; the gradient over `logits_mV`, in one launch."""
    log_sum_m, label_m, largest_m = _empty(row_m)
    _launch(logits_mV, row_m, counted_m, log_sum_m, label_m, largest_m, z_loss, STATISTICS=True, GRADIENT=True)
    return log_sum_m, label_m


def _empty(row_m: Tensor) -> list[Tensor]:
    return [torch.empty(len(row_m), dtype=torch.float32, device=row_m.device) for _ in range(3)]


def _launch(logits_mV: Tensor, *arguments: Tensor | float, **stages: Any) -> None:
    m, V = logits_mV.shape
    with torch.cuda.device_of(logits_mV):
        loss_kernel[(m,)](logits_mV, *arguments, V=V, **stages, BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def loss_kernel(
    logits_mV, row_m, counted_m, log_sum_m, label_m, largest_m, z_loss,
    V: tl.constexpr, STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    logits_V, row, b_B = logits_mV + m * V, tl.load(row_m + m), tl.arange(0, BLOCK)
    if STATISTICS:
        # Read first: the sums below wait for all threads, and then one of them may write the gradient over this logit.
        label = tl.load(logits_V + row, mask=(row >= 0) & (row < V), other=0.0).to(tl.float32)
        largest_B, sum_B = tl.full((BLOCK,), LOWEST, tl.float32), tl.zeros((BLOCK,), tl.float32)
        for v in range(0, V, BLOCK):
            real_B = v + b_B < V
            logit_B = tl.load(logits_V + v + b_B, mask=real_B, other=LOWEST).to(tl.float32)
            before_B, largest_B = largest_B, tl.maximum(largest_B, logit_B)
            sum_B = sum_B * tl.exp(before_B - largest_B) + tl.where(real_B, tl.exp(logit_B - largest_B), 0.0)
        largest = tl.max(largest_B, axis=0)
        log_sum = tl.log(tl.sum(sum_B * tl.exp(largest_B - largest), axis=0)) + largest
        tl.store(label_m + m, label)
        tl.store(log_sum_m + m, log_sum)
        tl.store(largest_m + m, largest)
    else:
        log_sum = tl.load(log_sum_m + m)
    if GRADIENT:
        counted, scale = tl.load(counted_m + m), 1.0 + 2.0 * z_loss * log_sum
        for v in range(0, V, BLOCK):
            real_B = v + b_B < V
            logit_B = tl.load(logits_V + v + b_B, mask=real_B, other=0.0).to(tl.float32)
            d_B = tl.where(counted, scale * tl.exp(logit_B - log_sum) - tl.where(v + b_B == row, 1.0, 0.0), 0.0)
            tl.store(logits_V + v + b_B, d_B.to(logits_mV.dtype.element_ty), mask=real_B)
