"""Training in tiles, each of them sharded over sequence ranks, equals whole rows in one process."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from all_to_alls import by_all_to_alls
from other_forms import other_forms
from test_exactness import OFFSETS, loss_and_gradients, mesh_of, packed_batch
from test_parallel_layouts import GRAD_CLIP
from training_on_layouts import T, build_engine, build_model, exact_gradients, layout_of, train_in_stages, train_steps

from tost_lm.data.prefetch import MicroBatch
from tost_lm.model.transforms import apply_activation_checkpointing
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.parallel.apply import checkpoint_context, parallelize
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.tiled import TiledLM, tile
from tost_lm.testing import Traffic, assert_close, run_on_ranks

WINDOW = 7
MODELS: list[dict[str, Any]] = [
    {"pattern": "TTA", "softmax": {"window": WINDOW}},
    {"pattern": "DDT", "tssa": {"denom_bias": "head"}},
    {
        "pattern": "TA",
        "layers": 2,
        "tssa": {"denom_bias": "head"},
        "positions": "none",
        **other_forms(window=T),
        "z_loss": 0.1,
    },
    {"pattern": "T", "tssa": {"denom_bias": "none"}, "positions": "none", "bias": False},
    {"pattern": "DDD", "positions": "none"},
    {"pattern": "DA", "layers": 2, "heads": 4, "positions": "none", "softmax": {"kv_heads": 2, "qk_norm": True}},
    {"pattern": "A", "positions": "none", "softmax": {"conv": True}},  # computed again in the backward
]
CHECKPOINTED = len(MODELS) - 1
BALANCED = range(len(MODELS), len(MODELS) + 3)
"""Sequence ranks that share heads; tensor ranks cannot split these models."""
for heads, kv_heads in ((2, 1), (6, 2), (3, 3)):  # on 4 ranks 2 groups of heads, whose two ranks share queries; 2; 1
    softmax = {"kv_heads": kv_heads, "qk_norm": "all-heads", "gate": True, "head_size": 4, "conv": True}
    MODELS.append({"pattern": "DA", "layers": 2, "heads": heads, "width": 12, "positions": "none", "softmax": softmax})


CASES = [  # model, tokens of a tile, packed documents
    # T = 26 is 9 + 9 + 8 or 13 + 13.
    (0, 9, None), (0, 13, OFFSETS[0]), (0, 9, OFFSETS[2]), (1, 9, OFFSETS[1]), (1, 13, None), (2, 9, OFFSETS[2]),
    (2, 13, OFFSETS[0]), (4, 9, OFFSETS[1]), (4, 13, None), (5, 7, None), (5, 7, OFFSETS[0]), (5, 9, OFFSETS[1]),
    (5, 11, OFFSETS[2]), (6, 7, OFFSETS[1]),
    *((number, *row) for number in BALANCED for row in ((T, None), (7, OFFSETS[1]), (T, OFFSETS[0]), (7, None))),
]  # fmt: skip


def drawn_model(number: int) -> TiledLM:
    return build_model(**MODELS[number]).double()


def cases(tensor: int, sequence: int) -> list[tuple[int, int, tuple[int, ...] | None]]:
    """Without sequence ranks, tiles differ from whole rows as on one rank: a few will do."""
    possible = CASES if tensor == 1 else [case for case in CASES if case[0] not in BALANCED]
    return possible if sequence > 1 else possible[::4]


def tiled_on_ranks(tensor: int, sequence: int) -> list[Any]:
    mesh = mesh_of(tensor, sequence)
    tokens, labels = packed_batch()
    count = (labels != IGNORED_LABEL).sum()
    record = []
    for number, tile_tokens, offsets in cases(tensor, sequence):
        model = parallelize(drawn_model(number), mesh)
        if number == CHECKPOINTED:
            context_fn = checkpoint_context(mesh)
            apply_activation_checkpointing(model, activation_checkpointing="full", context_fn=context_fn)
        tiling = tile(mesh, T, tile_tokens)
        here = torch.cat([torch.arange(*tile.columns) for tile in tiling.tiles])
        batch = MicroBatch(tokens[:, here], labels[:, here], torch.tensor(offsets) if offsets else None)
        record.append(exact_gradients(model, mesh, [batch], tiling, count, zero_stage=3 if number % 2 else 0))
    return record


@pytest.mark.parametrize(
    ("tensor", "sequence"),
    [(1, 2), (2, 1), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in [(2, 2), (1, 4)])],
)
def test_float64(tensor: int, sequence: int):
    tokens, labels = packed_batch()
    found = run_on_ranks(tiled_on_ranks, tensor * sequence, tensor, sequence)
    if sequence > 1:
        found += run_on_ranks(by_all_to_alls, tensor * sequence, tiled_on_ranks, tensor, sequence)
    for at, (number, tile_tokens, offsets) in enumerate(cases(tensor, sequence)):
        cu_seqlens = offsets and torch.tensor(offsets)
        true_loss, true = loss_and_gradients(drawn_model(number), tokens, labels, cu_seqlens=cu_seqlens)
        for record in found:
            loss, gradients = record[at]
            assert_close(loss, true_loss, 1e-10, f"loss of {MODELS[number]}, {tile_tokens}, {offsets}")
            assert gradients.keys() == true.keys()
            for key, gradient in true.items():
                assert_close(gradients[key], gradient, 1e-10, f"{key} of {MODELS[number]}, {tile_tokens}, {offsets}")


# All of them accumulate micro-batches.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "stages", "optimizer", "grad_clip"),
    [
        ({"sequence": 2}, (0, 1, 2, 3), "sgd", GRAD_CLIP),
        ({"sequence": 2, "tensor": 2}, (1, 2, 3), "adamw", 0.0),
        ({"shard_ranks": 2}, (1, 2, 3), "sgd", GRAD_CLIP),
    ],
)
def test_four_ranks_train_as_one_process(
    layout: dict[str, Any], stages: tuple[int, ...], optimizer: str, grad_clip: float
):
    run = partial(train_in_stages, tile_tokens=9, softmax={"window": WINDOW})
    for records in run_on_ranks(run, 4, layout, stages, optimizer, grad_clip):
        for record in records:
            record.assert_as_one_process(optimizer, grad_clip, softmax={"window": WINDOW})


def reductions(stage: int) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
    """Kind and bytes of the messages of one step, in whole rows and in tiles."""
    counted = []
    for tile_tokens in (None, 5):
        engine = build_engine(layout_of(zero_stage=stage), "sgd", softmax={"window": WINDOW})
        with Traffic() as traffic:
            train_steps(engine, "sgd", range(1), tile_tokens=tile_tokens)
        counted.append(Counter((sent.kind, sent.bytes) for sent in traffic.sent))
    return tuple(counted)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.quick),
    ],
)
def test_gradients_are_reduced_as_often_as_in_whole_rows(stage: int):
    for whole_rows, tiles in run_on_ranks(reductions, 2, stage):
        assert whole_rows == tiles
        assert sum(size * count for (_, size), count in tiles.items()) > 10_000


def train_in_bfloat16(tile_tokens: int | None) -> list[tuple[float, float]]:
    engine = build_engine(ParallelConfig(sequence=2, zero_stage=2), "sgd", bfloat16=True, softmax={"window": WINDOW})
    return train_steps(engine, "sgd", range(2), tile_tokens=tile_tokens)


def test_bfloat16():
    tiled, whole_rows = (torch.tensor(run_on_ranks(train_in_bfloat16, 2, size)[0]) for size in (9, None))
    torch.testing.assert_close(tiled, whole_rows, rtol=1e-2, atol=0)
