"""The execution of a plan, in a process without ranks: it has a process group of its own."""

import multiprocessing
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from memory_of_training import Settings

from tost_lm.config import validate
from tost_lm.data.loader import Batch
from tost_lm.pretrain.execute import batch_shard, execute_rank, layout_of
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.testing.ranks import PRELOADED


class Executed(NamedTuple):
    """The messages of one rank."""

    sent: dict[str, tuple[int, int]]
    """Calls and bytes in a step, by kind of collective."""
    peak: dict[str, int]


def executed(settings: Settings, world: int, ranks: Iterable[int], **changed: Any) -> list[Executed]:
    """These ranks, on batches as those of `memory_of_training`. `changed`: names in `tost_lm.parallel.sequence`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context) as process:
        return process.submit(_execute, settings, world, [*ranks], changed).result()


def _execute(settings: Settings, world: int, ranks: list[int], changed: dict[str, Any]) -> list[Executed]:
    import torch

    from tost_lm.parallel import sequence

    torch.set_num_threads(1)
    for name, value in changed.items():
        setattr(sequence, name, value)
    config = validate(PlanConfig, {**settings, "cluster": {"gpus_per_node": world}}, "test")
    layout, found = layout_of(config), []
    for rank in ranks:
        here = sum(end - start for start, end in batch_shard(config, layout, rank).columns)
        tokens = np.zeros((config.accumulation(world), config.train.micro_batch_size, here), np.int32)
        messages, peak = execute_rank(config, layout, rank, Batch(tokens, tokens, np.empty(0, np.int64)))
        calls, size = Counter[str](), Counter[str]()
        for message in messages:
            calls[message.kind] += 1
            size[message.kind] += message.bytes
        found.append(Executed({kind: (calls[kind], size[kind]) for kind in calls}, peak))
    return found
