"""Tensor parallelism of heads, MLP and vocabulary, with megatron-core's layers.

Megatron's sequence parallelism is always on: each of R ranks holds T/R tokens of the residual stream, [B, T/R, C]. A
column-parallel layer gathers all of them, [B, T, …]. Megatron splits the first dimension, so its inputs are transposed.
If R does not divide T, the stream is padded; mixers and loss do not see the padding.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from megatron.core import ModelParallelConfig, tensor_parallel, utils
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
from tost_lm.mixers.layer import HeadSoftmax, TokenMixer
from tost_lm.model.block import Mlp
from tost_lm.model.config import ModelConfig
from tost_lm.model.lm import Head, TostLM
from tost_lm.ops.cross_entropy import CrossEntropy
from tost_lm.ops.precision import statistics_dtype
from tost_lm.parallel.mesh import Axis, all_gather, all_reduce
from tost_lm.parallel.rank_weights import TensorSlice, mark_slice, slice_of
from tost_lm.parallel.settings import obstacle_to_tensor_ranks


def apply_tensor_parallelism(model: TostLM, axis: Axis) -> None:
    """Replace each layer by this rank's slice of it.

    Raises:
        ConfigError: heads or vocabulary are not divisible by the tensor ranks.
    """
    if obstacle := obstacle_to_tensor_ranks(model.config, axis.size):
        raise ConfigError(obstacle)
    if not torch.cuda.is_available():
        # From now on these modules of megatron-core find that the current device is the CPU; no others do.
        torch_on_cpu, cuda = ModuleType("torch"), ModuleType("torch.cuda")
        vars(cuda).update(vars(torch.cuda), current_device=lambda: torch.device("cpu"))
        vars(torch_on_cpu).update(vars(torch), cuda=cuda)
        for module in (tensor_parallel.layers, tensor_parallel.mappings, utils):
            vars(module)["torch"] = torch_on_cpu
    # In place of the buffer of megatron-core's parallel_state, which would create groups of its own.
    buffer = utils.GlobalMemoryBuffer()
    tensor_parallel.layers.get_global_memory_buffer = lambda: buffer
    residual = Residual(axis)
    with torch.device("meta"):  # megatron-core's layers start with weights of their own
        embedding = VocabularyEmbedding(model.embedding, residual)
        model.split_ends(embedding, VocabularyHead(model.head, model.config, residual), residual.shard)
        for name, module in list(model.named_modules()):
            if isinstance(module, TokenMixer):
                module.split_heads(axis.size, SoftmaxOverRanks(axis))
                _set_slices(module, module, axis, **dict.fromkeys(module.OF_HEADS, TensorSlice(0)))
            if isinstance(module, TokenMixer | Mlp):
                model.set_submodule(f"{name}.in_proj", Column(module.in_proj, residual, module.groups))
                model.set_submodule(f"{name}.out_proj", Row(module.out_proj, residual))


def sum_gradients_of_replicas(parameters: Iterable[nn.Parameter], axis: Axis) -> None:
    """Sum the gradients of replicated parameters over tensor ranks, where no engine does."""
    for parameter in parameters:
        if slice_of(parameter) is None:
            # Each rank's gradient covers its own tokens only.
            parameter.register_hook(lambda d: all_reduce(d.to(statistics_dtype(d)), axis).to(d.dtype))


class Residual:
    """The split of the current call's residual stream over tensor ranks."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.tokens = 0
        """T of the current call without padding. Activation checkpointing needs it until the backward is done."""

    @property
    def padding(self) -> int:
        return -self.tokens % self.axis.size

    def pad(self, x_BTC: Tensor) -> Tensor:
        """Pad T, of the whole call or of a tile, to a multiple of the ranks."""
        padding = -x_BTC.shape[1] % self.axis.size
        return pad(x_BTC, (0, 0, 0, padding)) if padding else x_BTC

    def shard(self, position_T: Tensor) -> Tensor:
        """This rank's tokens of positions [T] or [B, T]; padding repeats the last position."""
        padded = torch.cat([position_T, *[position_T[..., -1:]] * self.padding], -1)
        return padded.chunk(self.axis.size, -1)[self.axis.rank]

    def shard_tokens(self, x_BTC: Tensor) -> Tensor:
        """This rank's tokens of a whole residual stream, equal on all ranks: [B, T/R, C]. The first of a call."""
        self.tokens = x_BTC.shape[1]
        return self.pad(x_BTC).chunk(self.axis.size, 1)[self.axis.rank]


class Column(ColumnParallelLinear):
    """[B, T/R, in] → [B, T, out/R]; `out` concatenates `groups`, as in `TensorSlice`."""

    def __init__(self, whole: Any, residual: Residual, groups: tuple[int, ...]):
        out, width = whole.weight.shape
        super().__init__(
            width, out, config=_megatron(residual.axis, whole.weight.dtype), init_method=_no_init,
            bias=whole.bias is not None, gather_output=False, tp_group=residual.axis.group,
        )  # fmt: skip
        self.residual = residual
        _set_slices(self, whole, residual.axis, weight=TensorSlice(0, groups), bias=TensorSlice(0, groups))

    def forward(self, x_BTC: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Megatron gathers it unchanged, and NCCL needs contiguous memory.
        y_TBC, _ = super().forward(x_BTC.transpose(0, 1).contiguous())
        return y_TBC.transpose(0, 1)[:, : self.residual.tokens]


class Row(RowParallelLinear):
    """[B, T, in/R] → [B, T/R, out], by a reduce-scatter."""

    def __init__(self, whole: Any, residual: Residual):
        out, width = whole.weight.shape
        super().__init__(
            width, out, config=_megatron(residual.axis, whole.weight.dtype), init_method=_no_init,
            bias=whole.bias is not None, input_is_parallel=True, skip_bias_add=False, tp_group=residual.axis.group,
        )  # fmt: skip
        self.residual = residual
        _set_slices(self, whole, residual.axis, weight=TensorSlice(1), bias=None)

    def forward(self, x_BTC: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y_TBC, _ = super().forward(self.residual.pad(x_BTC).transpose(0, 1))
        return y_TBC.transpose(0, 1)


class VocabularyEmbedding(VocabParallelEmbedding):
    """Tokens [B, T] → embeddings of this rank's tokens, [B, T/R, C]. The first layer of a call: it sets `Residual`."""

    def __init__(self, whole: Any, residual: Residual):
        super().__init__(
            whole.num_embeddings, whole.embedding_dim, init_method=_no_init, reduce_scatter_embeddings=True,
            config=_megatron(residual.axis, whole.weight.dtype), tp_group=residual.axis.group,
        )  # fmt: skip
        self.residual = residual
        _set_slices(self, whole, residual.axis, weight=TensorSlice(0))

    def forward(self, tokens_BT: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.residual.tokens = tokens_BT.shape[1]
        return super().forward(pad(tokens_BT, (0, self.residual.padding))).transpose(0, 1)


class VocabularyHead(Head):
    """The head. The loss needs no gathered logits; `logits` gathers those of all words on every rank."""

    def __init__(self, whole: Head, config: ModelConfig, residual: Residual):
        super().__init__(config)
        self.residual = residual
        _set_slices(self, whole, residual.axis, weight=TensorSlice(0))
        self.words = VocabularyOverRanks(residual.axis, config.vocab_size // residual.axis.size)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_BTC: Tensor, tied_VC: Tensor | None, labels_BT: Tensor, *options: Any
    ) -> CrossEntropy:
        """Results of `Head.forward`, equal on all ranks."""
        x_TBC = self._gather(x_BTC, labels_BT.shape[1])
        return super().forward(x_TBC, tied_VC, labels_BT.T, *options).map_tokens(torch.t)

    def logits(self, x_BTC: Tensor, tied_VC: Tensor | None, tokens: int) -> Tensor:
        """Results of `Head.logits`."""
        logits_TBV = linear(self._gather(x_BTC, tokens), self.weight_or(tied_VC))
        return gather_from_tensor_model_parallel_region(logits_TBV, self.residual.axis.group).transpose(0, 1)

    def _gather(self, x_BTC: Tensor, tokens: int) -> Tensor:
        """[B, T/R, C] → [T, B, C]; the gradient is summed over ranks."""
        x_TBC = x_BTC.transpose(0, 1).contiguous()
        return gather_from_sequence_parallel_region(x_TBC, group=self.residual.axis.group)[:tokens]


class VocabularyOverRanks:
    """Contiguous vocabulary shards in rank order (a `tost_lm.ops.cross_entropy.VocabularyShard`)."""

    def __init__(self, axis: Axis, words: int):
        self.axis, self.vocab_start = axis, axis.rank * words

    def combine_log_sum_exp(self, log_sum_m: Tensor, label_m: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `VocabularyShard.combine_log_sum_exp`; gathers two numbers per token."""
        log_sum_Rm, label_Rm = all_gather(torch.stack([log_sum_m, label_m]), self.axis)().unbind(1)
        return log_sum_Rm.logsumexp(0), label_Rm.sum(0)

    def max_logit(self, logit_m: Tensor) -> Tensor:
        return all_gather(logit_m, self.axis)().amax(0)


class SoftmaxOverRanks(HeadSoftmax):
    """The softmax over the heads of all ranks."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def forward(self, z_MH: Tensor) -> Tensor:
        """Gathers one log-sum-exp per token while the softmax over the local heads is computed."""
        here_M1 = z_MH.logsumexp(-1, keepdim=True)
        pending = all_gather(here_M1, self.axis)
        pi_MH = (z_MH - here_M1).exp_()
        return pi_MH.mul_((here_M1 - pending().logsumexp(0)).exp_())

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        """Gathers three numbers per token: c = dΠ of the largest local Π, Σ Π and Σ Π·(dΠ − c).

        Where one head has nearly all of a token, Σ Π·dΠ alone cancels in float32.
        """
        centre_M1 = d_pi_MH.gather(-1, pi_MH.argmax(-1, keepdim=True))
        d_pi_MH = d_pi_MH - centre_M1
        sums = [centre_M1, pi_MH.sum(-1, keepdim=True), (pi_MH * d_pi_MH).sum(-1, keepdim=True)]
        centre_RM, mass_RM, product_RM = all_gather(torch.cat(sums, -1), self.axis)().unbind(-1)
        common_M = centre_RM.gather(0, mass_RM.argmax(0, keepdim=True))[0]
        mean_M = (product_RM + mass_RM * (centre_RM - common_M)).sum(0)
        return pi_MH * (d_pi_MH + (centre_M1 - common_M[:, None]) - mean_M[:, None])


def _set_slices(module: nn.Module, whole: nn.Module, axis: Axis, **slices: TensorSlice | None) -> None:
    """Set the parameters of `module` to this rank's slices of those of `whole`; None: replicated."""
    for name, tensor_slice in slices.items():
        if (parameter := getattr(whole, name)) is None:
            continue
        if tensor_slice is None:
            local = nn.Parameter(parameter.detach().clone())
        else:
            local = nn.Parameter(tensor_slice.local(parameter.detach(), axis).clone())
            set_tensor_model_parallel_attributes(local, True, tensor_slice.dim, len(tensor_slice.groups))
            mark_slice(local, tensor_slice)
        setattr(module, name, local)


def _megatron(axis: Axis, dtype: torch.dtype) -> ModelParallelConfig:
    return ModelParallelConfig(
        tensor_model_parallel_size=axis.size,
        sequence_parallel=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
    )


def _no_init(weight: Tensor) -> None: ...
