"""The engine on `fully_shard` trains as one process, and what `fully_shard` would lose or round is found if planted."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_state import whole_weights
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from training_on_layouts import (
    LR,
    Record,
    T,
    build_engine,
    build_model,
    build_optimizer,
    global_batch,
    layout_of,
    train_on_layout,
    train_steps,
)

from tost_lm import sizes
from tost_lm.data.prefetch import MicroBatch
from tost_lm.errors import ConfigError
from tost_lm.parallel import fsdp
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile
from tost_lm.testing import Traffic, run_on_ranks

STEPS, GRAD_CLIP, ROWS = 12, 0.5, 2
OFFSETS = (0, 7, T, T + 15, 2 * T)
"""Of the documents of each packed row."""
PATTERNS: list[dict[str, Any]] = [{"pattern": "DDDA", "layers": 4}, {"pattern": "TTA", "layers": 3}]
UNTIED = {**PATTERNS[0], "tied_head": False}
COUNT = 131_071  # bfloat16 would round it to 131,072


def packed_rows(step: int) -> tuple[Tensor, Tensor]:
    tokens, labels = global_batch(step)
    return tokens.reshape(ROWS, 2 * T), labels.reshape(ROWS, 2 * T)


def losses_of_one_process(**model: Any) -> list[float]:
    trained = build_model(**model)
    optimizer, losses = build_optimizer(trained, "adamw"), []
    for step in range(STEPS):
        tokens, labels = packed_rows(step)
        count = (labels >= 0).sum()
        optimizer.zero_grad()
        total = 0.0
        for row in zip(tokens.split(1), labels.split(1), strict=True):
            loss = trained(*row, cu_seqlens=torch.tensor(OFFSETS), label_count=count).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), GRAD_CLIP)
        optimizer.step()
        losses.append(total)
    return losses


def losses_on_layouts(layouts: list[tuple[ParallelConfig, int | None]], model: dict[str, Any]) -> list[list[float]]:
    """Of layouts and tokens of a tile."""
    return [losses_on(layout, tile_tokens, **model) for layout, tile_tokens in layouts]


def losses_on(layout: ParallelConfig, tile_tokens: int | None, **model: Any) -> list[float]:
    engine = build_engine(layout, "adamw", grad_clip=GRAD_CLIP, accumulation=1 if layout.tensor == 1 else 2, **model)
    mesh, losses = engine.mesh, []
    tiling = tile(mesh, 2 * T, tile_tokens)
    here = torch.cat([torch.arange(*tile.columns) for tile in tiling.tiles])
    for step in range(STEPS):
        tokens, labels = (x.chunk(mesh.data.size)[mesh.data.rank][:, here].split(1) for x in packed_rows(step))
        offsets = torch.tensor(OFFSETS, dtype=torch.int32)
        batches = [MicroBatch(*row, offsets) for row in zip(tokens, labels, strict=True)]
        losses.append(train_step(engine, batches, tiling, LR["adamw"]).loss)
    return losses


ON_TWO = [(layout_of(zero_stage=3), tile_tokens) for tile_tokens in (None, 20)]
ON_FOUR = [
    *((layout_of(sequence=2, zero_stage=stage), 20 if stage == 3 else None) for stage in (1, 2, 3)),
    (layout_of(tensor=2, sequence=2, zero_stage=3), None),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layouts", "model"),
    [*((4, ON_FOUR, model) for model in PATTERNS), (2, ON_TWO, UNTIED)],
    ids=["DDDA", "TTA", "untied head"],
)
def test_losses_of_twelve_steps_are_those_of_one_process(
    ranks: int, layouts: list[tuple[ParallelConfig, int | None]], model: dict[str, Any]
):
    expected = losses_of_one_process(**model)
    for found in run_on_ranks(losses_on_layouts, ranks, layouts, model, timeout_s=280)[0]:
        assert found == pytest.approx(expected, rel=2e-5)


def logits_and_whole_weights(tensor: int) -> tuple[list[tuple[Tensor, Tensor]], list[set[str]]]:
    """Logits before and after a step, beside those of one process; and the weights that are whole after a forward
    without labels, its logits, the step, a forward with labels and the backward."""
    engine = build_engine(layout_of(tensor=tensor, zero_stage=3), "adamw", tied_head=False)
    tokens, labels = global_batch(0)
    logits, whole = [], []

    def look() -> None:
        parameters = engine.module.named_parameters()
        whole.append({name for name, parameter in parameters if not isinstance(parameter, DTensor)})

    def compare() -> None:
        alone = build_model(tied_head=False)
        alone.load_state_dict(whole_weights(engine))
        with torch.no_grad():
            output = engine(tokens, output_state=False)
            look()
            logits.append((output.logits, alone(tokens).logits))

    compare()
    look()
    train_steps(engine, "adamw", range(1))
    look()
    compare()
    engine.backward([engine(tokens, labels=labels, output_state=False).loss])
    look()
    return logits, whole


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_untied_head_is_whole_while_it_computes(tensor: int):
    ends = {"positions.weight", "norm.weight", "norm.bias"}
    for logits, whole in run_on_ranks(logits_and_whole_weights, 2 * tensor, tensor):
        for found, expected in logits:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert whole == [ends, ends | {"head.weight"}, set(), ends, set()]


def call_with(plants: list[str], function: Any, *arguments: Any) -> Any:
    """The result of a function of this module while mistakes are planted."""
    without_states = lambda engine, roots, *_, **__: torch.autograd.backward(
        roots[0], torch.full_like(roots[0], 1 / engine._settings.accumulation)
    )
    policy = lambda **options: MixedPrecisionPolicy(**{**options, "cast_forward_inputs": True})
    planted = {
        "no gradients of states": (patch.object(fsdp.TorchEngine, "backward", without_states),),
        "cast inputs": (
            patch.object(fsdp, "MixedPrecisionPolicy", policy),
            patch.object(fsdp, "_Call", lambda *inputs: inputs),
            patch.object(fsdp._Root, "forward", lambda root, inputs: root.model(*inputs[0], **inputs[1])),
        ),
        "no sums": (patch.object(fsdp, "_sum_over", lambda *_, **__: None),),
    }
    with ExitStack() as stack:
        for plant in plants:
            for one in planted[plant]:
                stack.enter_context(one)
        return function(*arguments)


def train(layout: ParallelConfig, tile_tokens: int | None) -> Record:
    return train_on_layout(layout, "sgd", GRAD_CLIP, 1, tile_tokens=tile_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings", "tile_tokens", "plant"),
    [
        (2, {"zero_stage": 3}, 9, "no gradients of states"),
        (4, {"zero_stage": 1, "tensor": 2}, None, "no sums"),
        (2, {"zero_stage": 1, "tensor": 2}, None, "no sums"),
        (2, {"zero_stage": 0}, None, "no sums"),
    ],
)
def test_lost_gradients_are_found(ranks: int, settings: dict[str, int], tile_tokens: int | None, plant: str):
    found, planted = (
        run_on_ranks(call_with, ranks, plants, train, layout_of(**settings), tile_tokens)[0] for plants in ([], [plant])
    )
    found.assert_as_one_process("sgd", GRAD_CLIP, steps=1)
    with pytest.raises(AssertionError, match="gradient"):
        planted.assert_as_one_process("sgd", GRAD_CLIP, steps=1)


def dtypes_and_error(stage: int) -> tuple[list[torch.dtype], float]:
    """Of floating-point inputs of the second block in a step in tiles; and the error of the count of labels."""
    seen: list[torch.dtype] = []
    engine = build_engine(layout_of(zero_stage=stage), "sgd", bfloat16=True, pattern="DDT")

    def see(module: Any, inputs: Any) -> None:
        x, state, info = inputs
        seen.extend(y.dtype for y in (x, *(state or ()), *info.reported.values()) if y.is_floating_point())

    engine.module.blocks[1].register_forward_pre_hook(see)
    train_steps(engine, "sgd", range(1), tile_tokens=9)
    tokens = torch.zeros(1, T, dtype=torch.int64)
    with torch.no_grad():
        of_tensor, of_number = (
            engine(tokens, labels=tokens, label_count=count).loss.item()
            for count in (torch.tensor(float(COUNT)), COUNT)
        )
    return seen, of_tensor / of_number - 1


@pytest.mark.slow
def test_rounded_states_and_counts_are_found():
    [(expected, _), _] = run_on_ranks(call_with, 2, [], dtypes_and_error, 0)
    assert torch.float32 in expected
    for stage in (2, 3):
        for found in run_on_ranks(call_with, 2, [], dtypes_and_error, stage):
            assert found == (expected, 0)
    for seen, error in run_on_ranks(call_with, 2, ["cast inputs"], dtypes_and_error, 3):
        assert torch.float32 not in seen
        assert error != 0


def refusal_of_a_number() -> str:
    add = lambda model: model.register_parameter("scale", torch.nn.Parameter(torch.ones(())))
    with pytest.raises(ConfigError) as error:
        build_engine(layout_of(), "sgd", prepare=add)
    return str(error.value)


@pytest.mark.quick
def test_a_parameter_without_dimensions_is_refused():
    for error in run_on_ranks(refusal_of_a_number, 2):
        assert "cannot shard scale, which has no dimensions" in error


def curves_in_buckets(layouts: list[ParallelConfig], bfloat16: bool) -> list[tuple[list[Any], list[Any], int, int]]:
    """Steps with one bucket and with a bucket for each block, and how many messages each sends."""
    found = []
    for layout in layouts:
        curves, sent = [], []
        for sizes.BUCKET_ELEMENTS in (10**9, 1):
            engine = build_engine(layout, "adamw", bfloat16=bfloat16)
            with Traffic() as traffic:
                curves.append(train_steps(engine, "adamw", range(4)))
            sent.append(len(traffic.sent))
        found.append((*curves, *sent))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bfloat16", [False, True])
def test_several_buckets_are_one_bucket_to_the_bit(bfloat16: bool):
    layouts = [layout_of(zero_stage=stage) for stage in (1, 2, 3)]
    for outcomes in run_on_ranks(curves_in_buckets, 2, layouts, bfloat16):
        for whole, in_buckets, few, many in outcomes:
            assert in_buckets == whole
            assert many > few
