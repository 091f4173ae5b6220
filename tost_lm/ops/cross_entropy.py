"""Next-token cross-entropy of a linear head that never holds the logits of all tokens.

Tokens are processed in tiles whose logits fit a budget of bytes. The gradients of a tile are computed in the forward,
while its logits exist, because the backward only scales them by the gradient of the sum. Computing the logits again in
the backward would add a third to the work of the head. Without gradients, the vocabulary is split into tiles as well on
a CPU, where that is faster: a running maximum and sum combine their log-sum-exps. On a GPU, a Triton kernel turns
logits into loss and gradient in place.

Shapes: M tokens, C channels, V vocabulary entries on this rank; m tokens and v entries of a tile.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from tost_lm.ops.backends import LOW_PRECISION, Backend, choose, obstacle_to_kernels
from tost_lm.ops.precision import statistics_dtype
from tost_lm.sizes import DEVICE_LOGITS_BYTES, LOGITS_BYTES

IGNORED_LABEL = -100
CPU_SCORED_TOKENS, CPU_SCORED_BYTES = 2048, 1 << 23  # a tile without gradients; its logits stay in a cache


class VocabularyShard(Protocol):
    """The vocabulary entries of this rank, where the vocabulary is split over ranks."""

    @property
    def vocab_start(self) -> int: ...

    def combine_log_sum_exp(self, log_sum_m: Tensor, label_m: Tensor) -> tuple[Tensor, Tensor]:
        """From the values of this rank to those of all ranks: the log-sum-exp of the logits, and the label's logit.

        The label's logit is 0 on ranks that do not hold the label.
        """
        ...

    def max_logit(self, logit_m: Tensor) -> Tensor:
        """The largest logit over all ranks, from the largest on this rank."""
        ...


class CrossEntropy(NamedTuple):
    """The loss of M tokens. A token whose label is not counted has 0 nats and no gradient."""

    total: Tensor
    """Sum over the counted tokens, in nats, and z; differentiable once, by one backward."""
    nats_M: Tensor
    is_top_M: Tensor | None
    """Whether no vocabulary entry has a larger logit than the label; None with gradients."""
    z: Tensor
    """z_loss · Σ log-sum-exp² over the counted tokens, without gradient; 0 where no gradients are computed."""

    def map_tokens(self, change: Callable[[Tensor], Tensor]) -> "CrossEntropy":
        """With `change` applied to each tensor of tokens."""
        is_top = None if self.is_top_M is None else change(self.is_top_M)
        return self._replace(nats_M=change(self.nats_M), is_top_M=is_top)


def linear_cross_entropy(
    x_MC: Tensor,
    weight_VC: Tensor,
    labels_M: Tensor,
    *,
    shard: VocabularyShard | None = None,
    z_loss: float = 0.0,
) -> CrossEntropy:
    """−log softmax(x·Wᵀ) at each label, in float32 (float64 for float64 inputs).

    Where neither x nor the weight needs a gradient, only tokens with a counted label are computed.

    Args:
        x_MC: inputs of the head, any floating dtype.
        weight_VC: its weight.
        labels_M: int64; −100 is not counted.
        shard: the vocabulary is split over ranks. Labels are ids of the whole vocabulary, and x is the same on all
            ranks. The gradient of x covers this rank's entries only: sum it over ranks.
        z_loss: coefficient of the squared log-sum-exp of each counted token, which `total` includes with gradients.
    """
    needs_gradient = torch.is_grad_enabled() and (x_MC.requires_grad or weight_VC.requires_grad)
    if needs_gradient:
        total, nats_M, z = _LinearCrossEntropy.apply(x_MC, weight_VC, labels_M, shard, z_loss)  # pyright: ignore[reportGeneralTypeIssues]
        return CrossEntropy(total, nats_M, None, z)
    counted_M = labels_M != IGNORED_LABEL
    scored = _score(x_MC[counted_M], weight_VC, labels_M[counted_M], shard)
    nats_M, is_top_M = (torch.zeros_like(labels_M, dtype=x.dtype).masked_scatter_(counted_M, x) for x in scored)
    return CrossEntropy(nats_M.sum(), nats_M, is_top_M, nats_M.new_zeros(()))


def logit_tile_tokens(
    vocab_size: int, dtype: torch.dtype, logits_bytes: int = LOGITS_BYTES, *, in_place: bool = False
) -> int:
    """Tokens whose logits fit the budget, in `dtype` and, where it is narrower and not `in_place`, also in float32."""
    copies = 4 if dtype.itemsize < 4 and not in_place else 0
    return max(1, logits_bytes // (vocab_size * (dtype.itemsize + copies)))


def _tile_tokens(x: Tensor, vocab_size: int) -> int:
    budget = LOGITS_BYTES if x.is_cpu else DEVICE_LOGITS_BYTES
    return logit_tile_tokens(vocab_size, x.dtype, budget, in_place=bool(_kernels(x)))


_obstacle = partial(obstacle_to_kernels, dtypes=LOW_PRECISION, package="triton")
BACKENDS = [Backend("triton", _obstacle, "tost_lm.ops.cross_entropy_triton"), Backend("PyTorch", None, None)]
"""Modules of kernels, which change logits in place; None: the code below."""


def _kernels(x: Tensor) -> ModuleType | None:
    name = choose(BACKENDS, x)
    return name and import_module(name)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MC, weight_VC: Tensor, labels_M: Tensor, shard: VocabularyShard | None, z_loss):
        dtype = statistics_dtype(x_MC)
        gradients = torch.empty_like(x_MC), torch.zeros_like(weight_VC, dtype=dtype)
        nats_M, log_sum_M = (torch.empty_like(labels_M, dtype=dtype) for _ in range(2))
        tokens = _tile_tokens(x_MC, len(weight_VC))
        for start in range(0, len(x_MC), tokens):
            tile = slice(start, start + tokens)
            nats_M[tile], log_sum_M[tile] = _loss_of_tile(x_MC, weight_VC, labels_M, tile, shard, gradients, z_loss)
        z = z_loss * log_sum_M.square().sum() if z_loss else nats_M.new_zeros(())
        ctx.mark_non_differentiable(nats_M, z)
        ctx.gradients, ctx.dtypes = gradients, (x_MC.dtype, weight_VC.dtype)
        return nats_M.sum() + z, nats_M, z

    @staticmethod
    @once_differentiable
    def backward(ctx, d_sum: Tensor, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("one backward has used up the gradients of linear_cross_entropy; compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None
        return *(d.mul_(d_sum).to(dtype) for d, dtype in zip(gradients, ctx.dtypes, strict=True)), *[None] * 3


def _score(x_MC: Tensor, weight_VC: Tensor, labels_M: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """Nats, and whether the label has the largest logit; all labels are counted."""
    kernels, tokens, entries = _kernels(x_MC), _tile_tokens(x_MC, len(weight_VC)), len(weight_VC)
    if x_MC.is_cpu and not kernels:
        tokens = min(CPU_SCORED_TOKENS, max(1, len(x_MC)))
        entries = logit_tile_tokens(tokens, x_MC.dtype, CPU_SCORED_BYTES)
    nats_M = torch.empty_like(labels_M, dtype=statistics_dtype(x_MC))
    is_top_M = torch.empty_like(labels_M, dtype=torch.bool)
    for start in range(0, len(x_MC), tokens):
        tile = slice(start, start + tokens)
        x_mC, row_m = x_MC[tile], _weight_row(labels_M[tile], shard)
        if kernels:
            log_sum_m, label_m, largest_m = kernels.log_sums(linear(x_mC, weight_VC), row_m)
        else:
            log_sum_m, label_m, largest_m = _log_sums(x_mC, weight_VC, row_m, entries)
        if shard is not None:
            log_sum_m, label_m = shard.combine_log_sum_exp(log_sum_m, label_m)
            largest_m = shard.max_logit(largest_m)
        nats_M[tile], is_top_M[tile] = log_sum_m - label_m, label_m >= largest_m
    return nats_M, is_top_M


def _log_sums(x_mC: Tensor, weight_VC: Tensor, row_m: Tensor, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """log-sum-exp, the label's logit (0 if its row is not here) and the largest logit of each token."""
    label_m = torch.zeros_like(row_m, dtype=statistics_dtype(x_mC))
    sum_m1 = torch.zeros_like(label_m)[:, None]
    largest_m1 = torch.full_like(sum_m1, torch.finfo(sum_m1.dtype).min)  # −inf − (−inf) would be NaN
    for first in range(0, len(weight_VC), entries):
        weight_vC = weight_VC[first : first + entries]
        p_mv = linear(x_mC, weight_vC).to(label_m.dtype)
        is_here_m, index_m1 = _index(row_m - first, len(weight_vC))
        label_m += p_mv.gather(1, index_m1)[:, 0].where(is_here_m, 0)
        before_m1, largest_m1 = largest_m1, torch.maximum(largest_m1, p_mv.amax(1, keepdim=True))
        sum_m1 = sum_m1 * (before_m1 - largest_m1).exp_() + p_mv.sub_(largest_m1).exp_().sum(1, keepdim=True)
    return (sum_m1.log() + largest_m1)[:, 0], label_m, largest_m1[:, 0]


def _loss_of_tile(
    x_MC: Tensor,
    weight_VC: Tensor,
    labels_M: Tensor,
    tile: slice,
    shard: VocabularyShard | None,
    gradients: tuple[Tensor, Tensor],
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Nats and log-sum-exps of the tile's tokens [m], 0 where not counted; adds its gradients to `gradients`."""
    x_mC, labels_m = x_MC[tile], labels_M[tile]
    counted_m, row_m = labels_m != IGNORED_LABEL, _weight_row(labels_m, shard)
    log_sum_m, label_m, d_mV = _loss(x_mC, weight_VC, row_m, counted_m, shard, z_loss)
    d_x_MC, d_weight_VC = gradients
    d_x_MC[tile] = d_mV @ weight_VC
    if d_mV.dtype == d_weight_VC.dtype:
        d_weight_VC.addmm_(d_mV.T, x_mC)
    else:
        d_weight_VC += d_mV.T @ x_mC
    return (log_sum_m - label_m).where(counted_m, 0), log_sum_m.where(counted_m, 0)


def _loss(
    x_mC: Tensor, weight_VC: Tensor, row_m: Tensor, counted_m: Tensor, shard: VocabularyShard | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """log-sum-exp, the label's logit, and the gradient."""
    if kernels := _kernels(x_mC):
        return _loss_in_place(kernels, linear(x_mC, weight_VC), row_m, counted_m, shard, z_loss)
    p_mV = linear(x_mC, weight_VC).to(statistics_dtype(x_mC))
    is_here_m, index_m1 = _index(row_m, p_mV.shape[1])
    label_m = p_mV.gather(1, index_m1)[:, 0].where(is_here_m, 0)
    largest_m1 = p_mV.amax(1, keepdim=True)
    sum_m1 = p_mV.sub_(largest_m1).exp_().sum(1, keepdim=True)
    log_sum_m = (sum_m1.log() + largest_m1)[:, 0]
    if shard is not None:
        log_sum_m, label_m = shard.combine_log_sum_exp(log_sum_m, label_m)
    scale_m = counted_m * (1 + 2 * z_loss * log_sum_m)
    p_mV.mul_((largest_m1 - log_sum_m[:, None]).exp_() * scale_m[:, None])
    p_mV.scatter_add_(1, index_m1, -is_here_m[:, None].to(p_mV.dtype))
    return log_sum_m, label_m, p_mV.to(x_mC.dtype)


def _loss_in_place(
    kernels: ModuleType, logits_mV: Tensor, row_m: Tensor, counted_m: Tensor, shard: VocabularyShard | None,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `_loss`; the gradient takes the place of the logits."""
    if shard is None:
        return *kernels.log_sums_and_gradient_(logits_mV, row_m, counted_m, z_loss), logits_mV
    log_sum_m, label_m, _ = kernels.log_sums(logits_mV, row_m)
    log_sum_m, label_m = shard.combine_log_sum_exp(log_sum_m, label_m)
    kernels.gradient_(logits_mV, row_m, counted_m, log_sum_m, z_loss)
    return log_sum_m, label_m, logits_mV


def _weight_row(labels_m: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Row of each label in this rank's weight; out of range if another rank holds it or the label is not counted."""
    return labels_m - (shard.vocab_start if shard else 0)


def _index(row_m: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Whether the row is one of the first `rows` [m]; its index for `gather`, else 0, [m, 1]."""
    is_here_m = (row_m >= 0) & (row_m < rows)
    return is_here_m, row_m.where(is_here_m, 0)[:, None]
