"""The one order in which a model is spread over ranks."""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import noop_context_fn

from tost_lm.model.lm import TostLM
from tost_lm.ops.split import SequenceSplit
from tost_lm.parallel.collectives import keep_received
from tost_lm.parallel.mesh import Mesh
from tost_lm.parallel.sequence import RankShard


def parallelize(model: TostLM, mesh: Mesh) -> TostLM:
    """Turn a whole model, the same on every rank, into this rank's part of it, in place.

    1. Tensor: heads, MLP and vocabulary keep this rank's part, and gradients of what stays whole are summed.
    2. Sequence: nothing to wrap; shards of the tokens come with each call (`shard_of`).
    3. Data: DeepSpeed around all of it (`zero.build_engine`), over data × sequence ranks.

    Raises:
        ConfigError: heads or vocabulary cannot be shared out evenly.
    """
    if mesh.tensor.size > 1:
        from tost_lm.parallel.tensor import split_over_heads  # megatron-core takes seconds to import

        split_over_heads(model, mesh.tensor)
    return model


def kept_of_blocks(mesh: Mesh) -> Callable[[], Any]:
    """What `hold_less` is to keep of blocks that are computed again (its `context_fn`): what they received."""
    # To look at each operation takes as long as a small one: not where nothing is received.
    return keep_received if mesh.tensor.size * mesh.sequence.size > 1 else noop_context_fn


def shard_of(mesh: Mesh, split: SequenceSplit) -> RankShard | None:
    """What a call of the model is told of the other ranks' tokens; None: it has them all."""
    return RankShard(mesh.sequence, split) if mesh.sequence.size > 1 else None


def even_split(mesh: Mesh, tokens: int) -> SequenceSplit:
    """Sequences of so many tokens over the sequence ranks."""
    return SequenceSplit.even(tokens, mesh.sequence.size, mesh.sequence.rank)
