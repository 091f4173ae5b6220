"""Tensor parallelism: heads, MLP and vocabulary of a model over ranks, with megatron-core's layers.

Megatron's sequence parallelism is always on: between the layers the residual stream [B, T/R, C] is split over the
same ranks by tokens (after a column-parallel layer they are all here, [B, T, …]). Megatron splits the first dimension,
ours is the second: what it gets is transposed. A T that R does not divide is filled up, and what fills it is seen by
no mixer and no loss.
"""

import warnings
from typing import Any

import torch
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from tost_lm.errors import ConfigError
from tost_lm.model.block import Mlp
from tost_lm.model.config import ModelConfig
from tost_lm.model.lm import TostLM
from tost_lm.model.softmax import SoftmaxMixer
from tost_lm.model.tssa import TssaMixer
from tost_lm.ops.cross_entropy import linear_cross_entropy
from tost_lm.ops.naive import statistics_dtype
from tost_lm.ops.phases import UniformMemberships
from tost_lm.parallel.collectives import all_gather, all_reduce
from tost_lm.parallel.config import obstacle_to_tensor_ranks
from tost_lm.parallel.mesh import Axis
from tost_lm.parallel.part import Part, mark, part_of

if not torch.cuda.is_available():
    # megatron-core asks for it wherever it makes a buffer.
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue]
warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")


def split_over_heads(model: TostLM, axis: Axis) -> None:
    """Put this rank's part of every layer in the place of the whole one, and sum the gradients of what stays whole.

    Raises:
        ConfigError: heads or vocabulary cannot be shared out evenly.
    """
    if obstacle := obstacle_to_tensor_ranks(model.config, axis.size):
        raise ConfigError(obstacle)
    residual = Residual(axis)
    model.set_submodule("embedding", VocabularyEmbedding(model.embedding, residual))
    model.set_submodule("head", VocabularyHead(model.config, residual))
    model.share_of_residual = residual.share
    for name, module in list(model.named_modules()):
        if isinstance(module, TssaMixer | SoftmaxMixer):
            _split_heads(module, residual)
        if isinstance(module, TssaMixer | SoftmaxMixer | Mlp):
            groups = 3 if isinstance(module, SoftmaxMixer) else 1  # q, k and v
            model.set_submodule(f"{name}.in_proj", Column(module.in_proj, residual, groups))
            model.set_submodule(f"{name}.out_proj", Row(module.out_proj, residual))
    for parameter in model.parameters():
        if part_of(parameter) is None:
            # Each rank's gradient is of its own share of the tokens.
            parameter.register_hook(lambda d: all_reduce(d.to(statistics_dtype(d)), axis).to(d.dtype))


class Residual:
    """How the residual stream of the current call is split over tensor ranks."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.tokens = 0
        """Of the current call, before filling up; so with recomputed blocks, backward before the next call."""

    @property
    def filling(self) -> int:
        return -self.tokens % self.axis.size

    def fill(self, x_BTC: Tensor) -> Tensor:
        """Of all tokens, or of a portion of the stream on each rank, which is as it was gathered."""
        filling = -x_BTC.shape[1] % self.axis.size
        return pad(x_BTC, (0, 0, 0, filling)) if filling else x_BTC

    def share(self, position_T: Tensor) -> Tensor:
        """Positions [T] or [B, T] of the tokens that stand here in the stream; those that fill up have the last."""
        last = position_T[..., -1:]
        filled = torch.cat([position_T, *[last] * self.filling], -1)
        return filled.chunk(self.axis.size, -1)[self.axis.rank]


class Column(ColumnParallelLinear):
    """[B, T/R, in] → [B, T, out/R]; `groups`: q, k and v lie one after the other in `out`."""

    def __init__(self, whole: Any, residual: Residual, groups: int = 1):
        out, width = whole.weight.shape
        super().__init__(
            width, out, config=_megatron(residual.axis, whole.weight.dtype), init_method=_no_init,
            bias=whole.bias is not None, gather_output=False, tp_group=residual.axis.group,
        )  # fmt: skip
        self.residual = residual
        _take_parts(self, whole, residual.axis, weight=Part(0, groups), bias=Part(0, groups))

    def forward(self, x_BTC: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Contiguous: Megatron gathers it as it is, and NCCL wants it so.
        y_TBC, _ = super().forward(x_BTC.transpose(0, 1).contiguous())
        return y_TBC.transpose(0, 1)[:, : self.residual.tokens]


class Row(RowParallelLinear):
    """[B, T, in/R] → [B, T/R, out], the sum over ranks scattered."""

    def __init__(self, whole: Any, residual: Residual):
        out, width = whole.weight.shape
        super().__init__(
            width, out, config=_megatron(residual.axis, whole.weight.dtype), init_method=_no_init,
            bias=whole.bias is not None, input_is_parallel=True, skip_bias_add=False, tp_group=residual.axis.group,
        )  # fmt: skip
        self.residual = residual
        _take_parts(self, whole, residual.axis, weight=Part(1), bias=None)

    def forward(self, x_BTC: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y_TBC, _ = super().forward(self.residual.fill(x_BTC).transpose(0, 1))
        return y_TBC.transpose(0, 1)


class VocabularyEmbedding(VocabParallelEmbedding):
    """Tokens [B, T] → this rank's share of their embeddings, [B, T/R, C]. A call of the model begins here."""

    def __init__(self, whole: Any, residual: Residual):
        super().__init__(
            whole.num_embeddings, whole.embedding_dim, init_method=_no_init, reduce_scatter_embeddings=True,
            config=_megatron(residual.axis, whole.weight.dtype), tp_group=residual.axis.group,
        )  # fmt: skip
        self.residual = residual
        _take_parts(self, whole, residual.axis, weight=Part(0))

    def forward(self, tokens_BT: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.residual.tokens = tokens_BT.shape[1]
        return super().forward(pad(tokens_BT, (0, self.residual.filling))).transpose(0, 1)


class VocabularyHead(nn.Module):
    """The tied head: the loss from logits that stay where they are, and the logits of all words, on every rank."""

    def __init__(self, config: ModelConfig, residual: Residual):
        super().__init__()
        self.residual = residual
        self.words = VocabularyOverRanks(residual.axis, config.vocab_size // residual.axis.size)

    def forward(self, x_BTC: Tensor, weight_VC: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `TiedHead.forward`, the same on all ranks."""
        x_MC = self._gathered(x_BTC, labels_BT.shape[1]).flatten(0, 1)
        total, nats_M, is_top_M = linear_cross_entropy(x_MC, weight_VC, labels_BT.T.flatten(), shard=self.words)
        shape_TB = labels_BT.T.shape
        return total, nats_M.view(shape_TB).T, None if is_top_M is None else is_top_M.view(shape_TB).T

    def logits(self, x_BTC: Tensor, weight_VC: Tensor, tokens: int) -> Tensor:
        """As `TiedHead.logits`."""
        logits_TBV = linear(self._gathered(x_BTC, tokens), weight_VC)
        return gather_from_tensor_model_parallel_region(logits_TBV, self.residual.axis.group).transpose(0, 1)

    def _gathered(self, x_BTC: Tensor, tokens: int) -> Tensor:
        """[B, T/R, C] → [T, B, C]; its gradient is summed over the ranks."""
        x_TBC = x_BTC.transpose(0, 1).contiguous()
        return gather_from_sequence_parallel_region(x_TBC, group=self.residual.axis.group)[:tokens]


class VocabularyOverRanks:
    """The words of each rank one after another (a `tost_lm.ops.cross_entropy.VocabularyShard`)."""

    def __init__(self, axis: Axis, words: int):
        self.axis, self.first_word = axis, axis.rank * words

    def join(self, log_sum_m: Tensor, label_m: Tensor) -> tuple[Tensor, Tensor]:
        """As `VocabularyShard.join`; two numbers a token are gathered."""
        log_sum_Rm, label_Rm = all_gather(torch.stack([log_sum_m, label_m]), self.axis)().unbind(1)
        return log_sum_Rm.logsumexp(0), label_Rm.sum(0)

    def largest(self, logit_m: Tensor) -> Tensor:
        return all_gather(logit_m, self.axis)().amax(0)


class SoftmaxOverRanks:
    """The softmax over the heads of all ranks (a `tost_lm.ops.phases.HeadSoftmax`)."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def forward(self, z_MH: Tensor) -> Tensor:
        """One log-sum-exp a token is gathered, while the softmax of the heads here is computed."""
        here_M1 = z_MH.logsumexp(-1, keepdim=True)
        pending = all_gather(here_M1, self.axis)
        pi_MH = (z_MH - here_M1).exp_()
        return pi_MH.mul_((here_M1 - pending().logsumexp(0)).exp_())

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        """Three numbers a token are gathered: dΠ of the largest Π here, and Σ Π and Σ Π·dΠ, the latter beside that dΠ.

        Of the sum Σ Π·dΠ alone float32 loses what counts, where one head takes nearly all of a token.
        """
        centre_M1 = d_pi_MH.gather(-1, pi_MH.argmax(-1, keepdim=True))
        d_pi_MH = d_pi_MH - centre_M1
        sums = [centre_M1, pi_MH.sum(-1, keepdim=True), (pi_MH * d_pi_MH).sum(-1, keepdim=True)]
        centre_RM, mass_RM, product_RM = all_gather(torch.cat(sums, -1), self.axis)().unbind(-1)
        common_M = centre_RM.gather(0, mass_RM.argmax(0, keepdim=True))[0]
        mean_M = (product_RM + mass_RM * (centre_RM - common_M)).sum(0)
        return pi_MH * (d_pi_MH + (centre_M1 - common_M[:, None]) - mean_M[:, None])


def _split_heads(mixer: TssaMixer | SoftmaxMixer, residual: Residual) -> None:
    whole, axis = mixer.heads, residual.axis
    mixer.heads = whole // axis.size
    if isinstance(mixer, TssaMixer):
        mixer.softmax = UniformMemberships(whole) if mixer.membership == "uniform" else SoftmaxOverRanks(axis)
        _take_parts(mixer, mixer, axis, temp=Part(0), denom_bias=Part(0))


def _take_parts(module: nn.Module, whole: nn.Module, axis: Axis, **parts: Part | None) -> None:
    """Give `module` this rank's parts of the parameters of `whole`; None: all of it."""
    for name, part in parts.items():
        parameter = getattr(whole, name)
        if parameter is None:
            continue
        kept = nn.Parameter(parameter.detach().clone() if part is None else part.of(parameter.detach(), axis))
        if part is not None:
            set_tensor_model_parallel_attributes(kept, True, part.dim, part.groups)
            mark(kept, part)
        setattr(module, name, kept)


def _megatron(axis: Axis, dtype: torch.dtype) -> ModelParallelConfig:
    return ModelParallelConfig(
        tensor_model_parallel_size=axis.size,
        sequence_parallel=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
    )


def _no_init(weight: Tensor) -> None: ...
