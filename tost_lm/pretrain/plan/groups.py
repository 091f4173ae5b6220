"""What an engine sends over data × sequence ranks at once, from the settings alone (`tost_lm/parallel/fsdp.py`)."""

import math
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from tost_lm import sizes
from tost_lm.model.flops import Weight, block_weights, end_weights
from tost_lm.pretrain.settings import PretrainConfig


class Group(NamedTuple):
    """Parameters of a tensor rank that are gathered and reduced at once."""

    numbers: int
    padded: int
    """With the first dimension of each parameter padded to a multiple of the ranks that shard it."""
    blocks: int = 0
    """Consecutive blocks in it."""


NO_GROUP = Group(0, 0)


def sum_of(groups: Iterable[Group]) -> Group:
    """One group of all their parameters."""
    return Group(*map(sum, zip(NO_GROUP, *groups, strict=True)))


class Groups(NamedTuple):
    """All parameters of a tensor rank."""

    root: Group
    """Those that are whole from the first forward of a step, or at stage 3 of a tile, to its last backward."""
    buckets: list[Group]
    """Blocks in order; empty: the root has all."""
    embedding: Group = NO_GROUP
    head: Group = NO_GROUP
    """Both at stage 3, if they are not tied."""

    @property
    def total(self) -> Group:
        """All in one."""
        return sum_of([self.root, *self.buckets, self.embedding, self.head])


def stage_of(config: PretrainConfig, ranks: int) -> int:
    """The ZeRO stage of a launch on so many ranks. At 0 each rank has all weights and the optimizer's state."""
    return config.parallel.partitioning_stage(ranks // config.parallel.tensor)


def shards(config: PretrainConfig, ranks: int) -> int:
    """Ranks over which each parameter of a tensor rank is divided."""
    return config.parallel.shards(ranks // config.parallel.tensor) if stage_of(config, ranks) else 1


def groups_of(config: PretrainConfig, ranks: int) -> Groups:
    """The groups of a launch on so many ranks."""
    model, tensor, divided = config.model, config.parallel.tensor, shards(config, ranks)
    ends = end_weights(model, tensor)
    of_letter = {letter: block_weights(model, letter, tensor) for letter in set(model.letters)}
    numbers = {letter: sum(weight.size for weight in weights) for letter, weights in of_letter.items()}
    buckets = sizes.buckets(model.letters, numbers.__getitem__, sizes.BUCKET_ELEMENTS)
    of_buckets = [
        _group((weight for letter in bucket for weight in of_letter[letter]), divided, len(bucket))
        for bucket in buckets
    ]
    by_block = stage_of(config, ranks) == 3
    if not by_block and len(buckets) == 1:
        return Groups(sum_of([_group(ends, divided), *of_buckets]), [])
    if not by_block or model.tied_head:
        return Groups(_group(ends, divided), of_buckets)
    embedding, *root, head = ends
    return Groups(_group(root, divided), of_buckets, _group([embedding], divided), _group([head], divided))


def replicated_numbers(config: PretrainConfig, ranks: int) -> int:
    """Numbers in this rank's shards of the parameters that all tensor ranks have whole."""
    model, tensor, divided = config.model, config.parallel.tensor, shards(config, ranks)
    weights = chain(end_weights(model, tensor), *(block_weights(model, letter, tensor) for letter in model.letters))
    return _group((weight for weight in weights if weight.replicated), divided).padded // divided


def _group(weights: Iterable[Weight], shards: int, blocks: int = 0) -> Group:
    pairs = [(weight.size, math.ceil(weight.rows / shards) * shards * weight.columns) for weight in weights]
    numbers, padded = (sum(of_kind) for of_kind in zip(*pairs, strict=True))
    return Group(numbers, padded, blocks)
