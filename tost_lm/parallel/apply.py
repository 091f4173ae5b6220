"""Tensor and sequence parallelism of a whole model, for training and for inference."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from tost_lm.model.block import LMOutput, LMState
from tost_lm.model.lm import TostLM
from tost_lm.ops.layout import SequenceSplit
from tost_lm.parallel.mesh import Mesh, all_gather, keep_received
from tost_lm.parallel.sequence import RankShard

Model = TypeVar("Model", bound=TostLM)


def parallelize(model: Model, mesh: Mesh, allocate: Callable[[nn.Module], object] = lambda model: None) -> Model:
    """Shard a model, equal on all ranks, in place.

    A model on the meta device needs `allocate`, which is called with this rank's slices and gives them memory.

    1. Tensor: heads, MLP and vocabulary are split over ranks; gradients of replicated parameters are summed.
    2. Sequence: the model is unchanged; each call gets the sequence shard (`shard_of`).
    3. Data: an engine wraps the result (`tost_lm.parallel.engine`) over data × sequence ranks.

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
    sum_gradients_of_replicas(model.parameters(), mesh.tensor)
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

    def __init__(self, model: TostLM, mesh: Mesh, call: Callable[..., LMOutput] | None = None):
        """`call` is the engine of the model in training, which gathers its weights; None: the model itself."""
        super().__init__()
        self.model, self.config, self.mesh, self.name = model, model.config, mesh, "the model"
        self.call = call or model

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
            return self.call(tokens_BT, labels, state, cu_seqlens)._replace(loss=None)
        if tokens_BT.shape[1] < ranks.size:
            output = self.call(tokens_BT, labels, state, cu_seqlens)
            # Rank 0's logits, since rounding may differ between ranks and sampled tokens must not.
            return _map_outputs(output, lambda x_BTX: all_gather(x_BTX, ranks)()[0])
        split = even_split(self.mesh, tokens_BT.shape[1])
        shard = RankShard(ranks, split)
        here = None if labels is None else split.shard(labels)
        output = self.call(split.shard(tokens_BT), here, state, cu_seqlens, shard=shard)
        return _map_outputs(output, lambda x_BTX: shard.gather(x_BTX[:, None])[:, 0])


def _map_outputs(output: LMOutput, gather: Callable[[Tensor], Tensor]) -> LMOutput:
    nats_BT, is_top_BT = (None if x is None else gather(x[..., None])[..., 0] for x in (output.nats, output.is_top))
    return output._replace(loss=None, nats=nats_BT, is_top=is_top_BT, compute_logits=lambda: gather(output.logits))
