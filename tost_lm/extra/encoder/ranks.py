"""Tensor ranks of an encoder. Its embedding, positions and head stay whole on every rank."""

import torch

from tost_lm.errors import ConfigError
from tost_lm.extra.encoder.model import Encoder
from tost_lm.parallel.mesh import Axis
from tost_lm.parallel.settings import obstacle_to_split_blocks
from tost_lm.parallel.tensor import Residual, split_blocks, sum_gradients_of_replicas


def split_encoder(model: Encoder, axis: Axis) -> Encoder:
    """Split heads and MLPs of an encoder, equal on all tensor ranks, in place; gradients of the rest are summed.

    Raises:
        ConfigError: the ranks cannot share the heads, or there are other layers than T and A.
    """
    others = "/".join(sorted(set(model.config.pattern) - {"T", "A"}))
    if others:
        raise ConfigError(
            f"the {others} layers of an encoder do not support tensor parallelism; set parallel.tensor = 1"
        )
    if obstacle := obstacle_to_split_blocks(model.config.blocks, axis.size):
        raise ConfigError(obstacle)
    residual = Residual(axis)
    with torch.device("meta"):  # megatron-core's layers start with weights of their own
        split_blocks(model, residual)
    model.split_tokens(residual.shard_tokens, residual.gather_tokens)
    of_head = {*model.head.parameters()}  # all ranks compute the head alike
    sum_gradients_of_replicas((p for p in model.parameters() if p not in of_head), axis)
    return model
