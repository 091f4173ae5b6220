"""Compiled blocks on ranks: the training of one process, and nothing compiled after the second step."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters
from training_on_layouts import build_engine, train_on_layout, train_steps

from tost_lm.config import validate
from tost_lm.model.compilation import compile_blocks
from tost_lm.parallel.config import ParallelConfig
from tost_lm.testing import run_on_ranks

OPTIMIZER, GRAD_CLIP = "adamw", 0.5
FULL = {"activation_checkpointing": "full"}


def by_pytorch(function: Any, *arguments: Any) -> Any:
    """`function`, with graphs that PyTorch's own kernels run: compiling for the processor takes many times as long."""
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return function(*arguments)


def train_compiled(layouts: list[ParallelConfig], run: dict[str, Any]) -> list[Any]:
    compiled = partial(train_on_layout, prepare=compile_blocks, **run)
    return [by_pytorch(compiled, layout, OPTIMIZER, GRAD_CLIP) for layout in layouts]


@pytest.mark.parametrize(
    ("layouts", "run"),
    [
        ([{"zero_stage": 1}, {"sequence": 2, "zero_stage": 0}, {"sequence": 2, "zero_stage": 2}], {}),
        ([{"sequence": 2}], {"memory": FULL}),
        ([{"sequence": 2}], {"tile_tokens": 10, "window": 5}),
    ],
    ids=["layouts", "checkpointed", "tiles"],
)
def test_compiled_ranks_train_as_one_process(layouts: list[dict[str, int]], run: dict[str, Any]):
    validated = [validate(ParallelConfig, layout, "test") for layout in layouts]
    for record in run_on_ranks(train_compiled, 2, validated, run)[0]:
        record.assert_as_one_process(OPTIMIZER, GRAD_CLIP, window=run.get("window", 0))


def graphs_by_step(run: dict[str, Any], tile_tokens: int | None) -> list[int]:
    """Graphs compiled by the end of each of three steps."""
    engine, graphs = build_engine(ParallelConfig(sequence=2), OPTIMIZER, prepare=compile_blocks, **run), []
    for step in range(3):
        train_steps(engine, OPTIMIZER, range(step, step + 1), tile_tokens=tile_tokens)
        graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    return graphs


@pytest.mark.parametrize(("run", "tile_tokens"), [({}, None), ({"memory": FULL}, None), ({"window": 5}, 10)])
def test_nothing_is_compiled_after_the_second_step(run: dict[str, Any], tile_tokens: int | None):
    for graphs in run_on_ranks(partial(by_pytorch, graphs_by_step), 2, run, tile_tokens):
        assert graphs[0] > 0
        assert graphs[2] == graphs[1]
