"""Compiled blocks on ranks: the training of one process, and nothing compiled after the second step."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import training_on_layouts
from graph_breaks import other_graph_breaks
from torch._dynamo.utils import counters
from training_on_layouts import Record, train_on_layout

from tost_lm.config import validate
from tost_lm.model.transforms import compile_blocks
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.step import train_step
from tost_lm.testing import run_on_ranks

OPTIMIZER, GRAD_CLIP = "adamw", 0.5
FULL = {"activation_checkpointing": "full"}


def by_pytorch(function: Any, *arguments: Any) -> Any:
    """`function`, with graphs that PyTorch's own kernels run: compiling for the processor takes many times as long."""
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return function(*arguments)


def train_compiled(layouts: list[ParallelConfig], run: dict[str, Any]) -> list[tuple[Record, list[int]]]:
    """For each layout, the record of its steps and the graphs compiled by the end of each."""
    return [by_pytorch(train_and_count, layout, run) for layout in layouts]


def train_and_count(layout: ParallelConfig, run: dict[str, Any]) -> tuple[Record, list[int]]:
    graphs: list[int] = []

    def counted_step(*arguments: Any) -> Any:
        outcome = train_step(*arguments)
        graphs.append(counters["stats"]["unique_graphs"])
        return outcome

    with patch.object(training_on_layouts, "train_step", counted_step):
        record = train_on_layout(layout, OPTIMIZER, GRAD_CLIP, prepare=compile_blocks, **run)
    assert not other_graph_breaks()
    return record, graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "run"),
    [
        ([{"zero_stage": 1}, {"sequence": 2, "zero_stage": 0}, {"sequence": 2, "zero_stage": 2}], {}),
        ([{"sequence": 2}], {"memory": FULL}),
        ([{"sequence": 2}], {"tile_tokens": 10, "softmax": {"window": 5}}),
        ([{"zero_stage": 1}, {"sequence": 2, "zero_stage": 3}], {}),
        ([{"sequence": 2, "zero_stage": 3}], {"memory": FULL}),
        ([{"sequence": 2, "zero_stage": 3}], {"tile_tokens": 10, "softmax": {"window": 5}}),
        ([{"sequence": 2, "zero_stage": 3}], {"tile_tokens": 10}),
        ([{"sequence": 2}], {"tile_tokens": 10, "memory": FULL}),
    ],
    ids=["layouts", "checkpointed", "tiles", "fsdp", "fsdp checkpointed", "fsdp tiles", "growing", "growing again"],
)
def test_compiled_ranks_train_as_one_process_and_compile_nothing_after_the_second_step(
    layouts: list[dict[str, Any]], run: dict[str, Any]
):
    validated = [validate(ParallelConfig, layout, "test") for layout in layouts]
    for record, graphs in run_on_ranks(train_compiled, 2, validated, run, timeout_s=280)[0]:
        record.assert_as_one_process(OPTIMIZER, GRAD_CLIP, softmax=run.get("softmax", {}))
        assert graphs[0] > 0
        assert len(graphs) > 2
        assert graphs[-1] == graphs[1]
