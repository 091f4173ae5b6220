"""Next-token cross-entropy of a linear head without the logits of all tokens.

Tokens are taken in portions whose logits fit a budget of bytes. The gradients of a portion are computed at once, while
its logits are there, for they are linear in what comes in later: one number, the gradient of the sum. So the logits
are computed once, where recomputation would add a third to the head's work. Without gradients the words are taken in
portions too where that is faster, on a CPU: their sums of exponentials are joined as they come.

Shapes: M tokens, C channels, V words of the vocabulary that are here, m tokens and v words of a portion.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from tost_lm.ops.naive import statistics_dtype

IGNORED_LABEL = -100
LOGITS_BYTES = 1 << 28
CPU_SCORED_TOKENS, CPU_SCORED_BYTES = 2048, 1 << 23  # without gradients: logits that stay in a cache, in memory kept


class VocabularyShard(Protocol):
    """The words here among those that lie on several ranks."""

    @property
    def first_word(self) -> int: ...

    def join(self, log_sum_m: Tensor, label_m: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum-exp of the logits of all words, from those here; the label's logit, 0 where it is elsewhere."""
        ...

    def largest(self, logit_m: Tensor) -> Tensor:
        """The largest logit of all words, from that of those here."""
        ...


class CrossEntropy(NamedTuple):
    """Of M tokens; what is of each is 0 where the label is not counted, and has no gradient."""

    total: Tensor
    """In nats, differentiable once (and backward through it once)."""
    nats_M: Tensor
    is_top_M: Tensor | None
    """Whether no word has a larger logit than the label; None with gradients, where nobody asks."""


def linear_cross_entropy(
    x_MC: Tensor,
    weight_VC: Tensor,
    labels_M: Tensor,
    *,
    shard: VocabularyShard | None = None,
    logits_bytes: int | None = None,
) -> CrossEntropy:
    """−log softmax(x·Wᵀ) at each label, in float32 (float64 for float64 inputs).

    Without gradients, only where the label is counted.

    Args:
        x_MC: inputs of the head, any floating dtype.
        weight_VC: its weight.
        labels_M: int64; −100 is not counted.
        shard: the vocabulary lies on several ranks; labels are of the whole of it, and x is the same on all of them.
            x's gradient is then of the words here: to be summed over ranks.
        logits_bytes: what a portion's logits may take, at least those of one token (without gradients on a CPU of one
            word); None: LOGITS_BYTES, or fewer where that is faster.
    """
    if torch.is_grad_enabled():
        total, nats_M = _LinearCrossEntropy.apply(x_MC, weight_VC, labels_M, shard, logits_bytes or LOGITS_BYTES)  # pyright: ignore[reportGeneralTypeIssues]
        return CrossEntropy(total, nats_M, None)
    counted_M = labels_M != IGNORED_LABEL
    counted = _scores(x_MC[counted_M], weight_VC, labels_M[counted_M], shard, logits_bytes)
    nats_M, is_top_M = (torch.zeros_like(labels_M, dtype=x.dtype).masked_scatter_(counted_M, x) for x in counted)
    return CrossEntropy(nats_M.sum(), nats_M, is_top_M)


def portion_tokens(words: int, dtype: torch.dtype, logits_bytes: int = LOGITS_BYTES) -> int:
    """Tokens whose logits are held at once: in `dtype`, and beside them in float32 where that is wider."""
    wide = max(4, dtype.itemsize)
    return max(1, logits_bytes // (words * (wide + (dtype.itemsize if dtype.itemsize < wide else 0))))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MC: Tensor, weight_VC: Tensor, labels_M: Tensor, shard: VocabularyShard | None, logits_bytes):
        dtype = statistics_dtype(x_MC)
        gradients = None
        if any(ctx.needs_input_grad):
            gradients = torch.empty_like(x_MC), torch.zeros_like(weight_VC, dtype=dtype)
        nats_M = torch.empty_like(labels_M, dtype=dtype)
        portion = portion_tokens(len(weight_VC), x_MC.dtype, logits_bytes)
        for start in range(0, len(x_MC), portion):
            here = slice(start, start + portion)
            nats_M[here] = _portion(x_MC, weight_VC, labels_M, here, shard, gradients)
        ctx.mark_non_differentiable(nats_M)
        ctx.gradients, ctx.dtypes = gradients, (x_MC.dtype, weight_VC.dtype)
        return nats_M.sum(), nats_M

    @staticmethod
    @once_differentiable
    def backward(ctx, d_sum: Tensor, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of linear_cross_entropy are used up by one backward")
        gradients, ctx.gradients = ctx.gradients, None
        return *(d.mul_(d_sum).to(dtype) for d, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None, None


def _scores(
    x_MC: Tensor, weight_VC: Tensor, labels_M: Tensor, shard: VocabularyShard | None, logits_bytes: int | None
) -> tuple[Tensor, Tensor]:
    """Nats, and whether the label is the top word; all labels are counted."""
    if x_MC.device.type == "cpu":
        tokens = min(CPU_SCORED_TOKENS, max(1, len(x_MC)))
        words = portion_tokens(tokens, x_MC.dtype, logits_bytes or CPU_SCORED_BYTES)
    else:
        tokens, words = portion_tokens(len(weight_VC), x_MC.dtype, logits_bytes or LOGITS_BYTES), len(weight_VC)
    nats_M = torch.empty_like(labels_M, dtype=statistics_dtype(x_MC))
    is_top_M = torch.empty_like(labels_M, dtype=torch.bool)
    for start in range(0, len(x_MC), tokens):
        here = slice(start, start + tokens)
        nats_M[here], is_top_M[here] = _scored_portion(x_MC[here], weight_VC, labels_M[here], shard, words)
    return nats_M, is_top_M


def _scored_portion(
    x_mC: Tensor, weight_VC: Tensor, labels_m: Tensor, shard: VocabularyShard | None, words: int
) -> tuple[Tensor, Tensor]:
    """The same of a portion, whose logits are there for `words` words at once."""
    word_m = _word_here(labels_m, shard)
    label_m = torch.zeros_like(labels_m, dtype=statistics_dtype(x_mC))
    sum_m1 = torch.zeros_like(label_m)[:, None]
    largest_m1 = torch.full_like(sum_m1, torch.finfo(sum_m1.dtype).min)  # no −inf, which less itself is no number
    for first in range(0, len(weight_VC), words):
        weight_vC = weight_VC[first : first + words]
        p_mv = linear(x_mC, weight_vC).to(label_m.dtype)
        is_here_m, index_m1 = _among(word_m - first, len(weight_vC))
        label_m += p_mv.gather(1, index_m1)[:, 0].where(is_here_m, 0)
        before_m1, largest_m1 = largest_m1, torch.maximum(largest_m1, p_mv.amax(1, keepdim=True))
        sum_m1 = sum_m1 * (before_m1 - largest_m1).exp_() + p_mv.sub_(largest_m1).exp_().sum(1, keepdim=True)
    log_sum_m, largest_m = (sum_m1.log() + largest_m1)[:, 0], largest_m1[:, 0]
    if shard is not None:
        log_sum_m, label_m = shard.join(log_sum_m, label_m)
        largest_m = shard.largest(largest_m)
    return log_sum_m - label_m, label_m >= largest_m


def _portion(
    x_MC: Tensor,
    weight_VC: Tensor,
    labels_M: Tensor,
    here: slice,
    shard: VocabularyShard | None,
    gradients: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Nats of a portion [m]; puts its gradients into those of all."""
    x_mC, labels_m = x_MC[here], labels_M[here]
    logits_mV = linear(x_mC, weight_VC)
    compute_dtype = logits_mV.dtype
    p_mV = logits_mV.to(statistics_dtype(x_MC))
    del logits_mV
    counted_m = labels_m != IGNORED_LABEL
    is_here_m, index_m1 = _among(_word_here(labels_m, shard), len(weight_VC))
    label_m = p_mV.gather(1, index_m1)[:, 0].where(is_here_m, 0)
    largest_m1 = p_mV.amax(1, keepdim=True)
    sum_m1 = p_mV.sub_(largest_m1).exp_().sum(1, keepdim=True)
    log_sum_m = (sum_m1.log() + largest_m1)[:, 0]
    if shard is not None:
        log_sum_m, label_m = shard.join(log_sum_m, label_m)
    if gradients is not None:
        d_x_MC, d_weight_VC = gradients
        d_mV = p_mV.mul_((largest_m1 - log_sum_m[:, None]).exp_() * counted_m[:, None])
        d_mV.scatter_add_(1, index_m1, -is_here_m[:, None].to(d_mV.dtype))
        d_mV = d_mV.to(compute_dtype)
        d_x_MC[here] = d_mV @ weight_VC
        if compute_dtype == d_weight_VC.dtype:
            d_weight_VC.addmm_(d_mV.T, x_mC)
        else:
            d_weight_VC += d_mV.T @ x_mC
    return (log_sum_m - label_m).where(counted_m, 0)


def _word_here(labels_m: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Row of the weight here; below 0 or beyond the last where the word is elsewhere, or none is counted."""
    return labels_m - (shard.first_word if shard else 0)


def _among(word_m: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Whether the word is one of the first `words` [m]; its column, or 0, [m, 1]."""
    is_here_m = (word_m >= 0) & (word_m < words)
    return is_here_m, word_m.where(is_here_m, 0)[:, None]
