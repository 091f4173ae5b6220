"""Tensor and sequence parallelism of a whole model, for training and for inference; and the weights that a rank holds,
without the rest of the model: its slices, their memory and their values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from tost_lm.model.block import LMOutput, LMState
from tost_lm.model.config import ModelConfig
from tost_lm.model.encoder import Encoder
from tost_lm.model.initialization import Normal, draw, draw_seed, initial_values
from tost_lm.model.lm import TostLM
from tost_lm.ops.layout import SequenceSplit
from tost_lm.parallel.mesh import Axis, Mesh, all_gather, keep_received
from tost_lm.parallel.sequence import RankShard


@dataclass(frozen=True)
class TensorSlice:
    """Dimension `dim` concatenates groups (q, k and v, say); each group is split evenly over ranks."""

    dim: int
    groups: tuple[int, ...] = (1,)
    """Relative sizes of the groups."""

    def local(self, whole: Tensor, axis: Axis) -> Tensor:
        """This rank's slice, a view of `whole` if there is one group."""
        ranges = self.ranges(whole.shape[self.dim], axis)
        parts = [whole.narrow(self.dim, held.start, len(held)) for held in ranges]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0]

    def ranges(self, size: int, axis: Axis) -> list[range]:
        """The indices in dimension `dim`, of length `size` in the whole tensor, that this rank holds."""
        unit, starts = size // sum(self.groups), accumulate(self.groups, initial=0)
        parts = [(start * unit, count * unit // axis.size) for start, count in zip(starts, self.groups, strict=False)]
        return [range(start + axis.rank * length, start + (axis.rank + 1) * length) for start, length in parts]

    def gather(self, local: Tensor, axis: Axis) -> Tensor:
        """The whole tensor on every rank; a collective call."""
        ranks = [self._groups(of_rank) for of_rank in all_gather(local, axis)()]
        return torch.cat([x for group in zip(*ranks, strict=True) for x in group], self.dim)

    def _groups(self, tensor: Tensor) -> tuple[Tensor, ...]:
        unit = tensor.shape[self.dim] // sum(self.groups)
        return tensor.split([size * unit for size in self.groups], self.dim)


def mark_slice(parameter: nn.Parameter, tensor_slice: TensorSlice) -> None:
    parameter.tensor_slice = tensor_slice  # pyright: ignore[reportAttributeAccessIssue]


def slice_of(parameter: nn.Parameter) -> TensorSlice | None:
    """How a parameter is split over tensor ranks; None: it is replicated."""
    return getattr(parameter, "tensor_slice", None)


def allocate(model: nn.Module, device: torch.device, dtype: torch.dtype, *, shared: bool = False) -> None:
    """Replace all parameters, which are on the meta device, by new ones without values.

    Args:
        shared: all have the same memory, that of the largest: for a DeepSpeed engine that copies weights into its own.
    """
    parameters = dict(model.named_parameters())
    largest = max(parameter.numel() for parameter in parameters.values())
    memory = torch.empty(largest if shared else 0, dtype=dtype, device=device)
    for name, parameter in parameters.items():
        if shared:
            data = memory[: parameter.numel()].view(parameter.shape)
        else:
            data = torch.empty(parameter.shape, dtype=dtype, device=device)
        allocated = nn.Parameter(data)
        marks = {key: mark for key, mark in vars(parameter).items() if not hasattr(allocated, key)}
        vars(allocated).update(marks)  # of tensor ranks
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, allocated)


def draw_on_rank(model: nn.Module, config: ModelConfig, axis: Axis) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of each parameter's slice on this tensor rank, float32 on the CPU, as `TostLM(config)` draws it.

    The seed comes from torch's CPU generator, which all ranks seed alike.
    """
    seed = draw_seed()
    with torch.device("meta"):
        whole = TostLM(config)
    values = initial_values(whole, config.layers)
    for name, parameter in model.named_parameters():
        value, shape, held = values[name], whole.get_parameter(name).shape, slice_of(parameter)
        if isinstance(value, Normal) and held is not None:
            yield name, draw(value, seed, name, shape, held.dim, held.ranges(shape[held.dim], axis))
        elif isinstance(value, Normal):
            yield name, draw(value, seed, name, shape)
        else:
            yield name, local_slice(torch.as_tensor(value, dtype=torch.float32).expand(shape), parameter, axis)


def local_slice(whole: Tensor, parameter: nn.Parameter, axis: Axis) -> Tensor:
    """This tensor rank's slice of a whole tensor of a parameter."""
    held = slice_of(parameter)
    return whole if held is None else held.local(whole, axis)


Model = TypeVar("Model", bound=TostLM | Encoder)


def parallelize(model: Model, mesh: Mesh, allocate: Callable[[nn.Module], object] = lambda model: None) -> Model:
    """Shard a model, equal on all ranks, in place.

    A model on the meta device needs `allocate`, which is called with this rank's slices and gives them memory.

    1. Tensor: heads, MLP and vocabulary are split over ranks; gradients of replicated parameters are summed.
    2. Sequence: the model is unchanged; each call gets the sequence shard (`shard_of`). Not for an `Encoder`.
    3. Data: DeepSpeed wraps the result (`zero.build_engine`) over data × sequence ranks.

    Raises:
        ConfigError: heads or vocabulary are not divisible by the tensor ranks.
    """
    if mesh.tensor.size == 1:
        allocate(model)
        return model
    # megatron-core takes seconds to import
    from tost_lm.parallel.tensor import apply_tensor_parallelism, sum_gradients_of_replicas

    apply_tensor_parallelism(model, mesh.tensor)
    allocate(model)  # makes new parameters, and gradients are hooks of parameters
    sum_gradients_of_replicas(model, mesh.tensor)
    return model


def checkpoint_context(mesh: Mesh) -> Callable[[], Any]:
    """`context_fn` of `apply_activation_checkpointing`: with several ranks, blocks keep received tensors."""
    # Without communication it is off, since inspecting each operation costs as much as a small operation.
    return keep_received if mesh.tensor.size * mesh.sequence.size > 1 else noop_context_fn


def shard_of(mesh: Mesh, split: SequenceSplit) -> RankShard | None:
    """The `shard` argument of the model on this rank; None: the rank has all tokens."""
    return RankShard(mesh.sequence, split) if mesh.sequence.size > 1 else None


def even_split(mesh: Mesh, tokens: int) -> SequenceSplit:
    """Sequences of `tokens` tokens over the sequence ranks."""
    return SequenceSplit.even(tokens, mesh.sequence.size, mesh.sequence.rank)


class ShardedInference(nn.Module):
    """A model after `parallelize`, called like `TostLM`.

    All ranks call it with equal arguments and get bit-equal logits. The state covers the whole sequence; on a tensor
    rank it covers the local heads only.
    """

    def __init__(self, model: nn.Module, config: ModelConfig, mesh: Mesh):
        """`model` is a parallelized `TostLM`, or an engine of one: at ZeRO stage 3 it gathers the weights."""
        super().__init__()
        self.model, self.config, self.mesh = model, config, mesh

    def forward(
        self,
        tokens_BT: Tensor,
        labels: Tensor | None = None,
        state: LMState | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> LMOutput:
        """Process whole sequences; each sequence rank processes its shard.

        With fewer tokens than sequence ranks, as in decoding, every rank processes all of them.

        Args:
            tokens_BT: ids, int64, the whole sequences on every rank.
            labels: [B, T], as in `TostLM`.
            state: of an earlier call.
            cu_seqlens: int32 [N + 1], document offsets in the whole sequence.

        Returns:
            Logits [B, T, V] and, with labels, nats [B, T], and the state after the last token; no loss.

        Raises:
            ConfigError, ValueError: as `TostLM`.
        """
        ranks = self.mesh.sequence
        if ranks.size == 1:
            return self.model(tokens_BT, labels, state, cu_seqlens)._replace(loss=None)
        if tokens_BT.shape[1] < ranks.size:
            output: LMOutput = self.model(tokens_BT, labels, state, cu_seqlens)
            # Rank 0's logits, since rounding may differ between ranks and sampled tokens must not.
            return _map_outputs(output, lambda x_BTX: all_gather(x_BTX, ranks)()[0])
        split = even_split(self.mesh, tokens_BT.shape[1])
        shard = RankShard(ranks, split)
        here = None if labels is None else split.shard(labels)
        output = self.model(split.shard(tokens_BT), here, state, cu_seqlens, shard=shard)
        return _map_outputs(output, lambda x_BTX: shard.gather(x_BTX[:, None])[:, 0])


def _map_outputs(output: LMOutput, gather: Callable[[Tensor], Tensor]) -> LMOutput:
    nats_BT, is_top_BT = (None if x is None else gather(x[..., None])[..., 0] for x in (output.nats, output.is_top))
    return output._replace(loss=None, nats=nats_BT, is_top=is_top_BT, compute_logits=lambda: gather(output.logits))
