"""Apply tensor and sequence parallelism to a model."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import noop_context_fn

from tost_lm.model.lm import TostLM
from tost_lm.ops.sequence_shard import SequenceSplit
from tost_lm.parallel.collectives import keep_received
from tost_lm.parallel.mesh import Mesh
from tost_lm.parallel.sequence import RankShard


def parallelize(model: TostLM, mesh: Mesh, allocate: Callable[[nn.Module], object] = lambda model: None) -> TostLM:
    """Shard a model, equal on all ranks, in place.

    A model on the meta device needs `allocate`, which is called with this rank's slices and gives them memory.

    1. Tensor: heads, MLP and vocabulary are split over ranks; gradients of replicated parameters are summed.
    2. Sequence: the model is unchanged; each call gets the sequence shard (`shard_of`).
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
