"""Ranks that read their own sequences of packed documents and mixtures train as one process does."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_state import whole_weights
from hand_made import hand_made
from torch import Tensor
from training_on_layouts import BATCH, LR, VOCAB, T, build_engine, micro_batch_size

from tost_lm.config import validate
from tost_lm.data.loader import Corpora, TrainingBatches
from tost_lm.data.prefetch import MicroBatch, micro_batches, prefetched
from tost_lm.data.stages import Packing
from tost_lm.model.flops import document_flops
from tost_lm.model.lm import TostLM
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.batches import build_batches, tiling_of
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.validation import Validation
from tost_lm.testing import FLOAT32_REORDERED, assert_close, run_on_ranks

pytestmark = pytest.mark.quick

STEPS = 3
POSITION_ENDS = [8, 16, T]


class Trained(NamedTuple):
    validation: dict[str, Any]
    """Validation of the first batch, before the first step."""
    records: list[tuple[float, float, float]]
    """Loss, gradient norm and FLOPs of each step."""
    weights: dict[str, Tensor]
    by_hand: tuple[list[float], list[float]]
    """Loss by position and by corpus of the first batch, by a loop over its tokens; one rank only."""


def settings(folder: Path, packing: Packing, parallel: ParallelConfig, micro_batch: int) -> PretrainConfig:
    tree = {
        "model": {"layers": 1, "heads": 4, "width": 8, "vocab_size": VOCAB, "max_positions": T},
        "data": {"mixture": {str(folder / "a"): 1, str(folder / "b"): 2}, "packing": packing},
        "train": {"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": micro_batch, "seq_len": T},
        "parallel": parallel.model_dump(),
        "run": {"name": "r"},
    }
    return validate(PretrainConfig, tree, "test")


def corpora_in(folder: Path) -> Corpora:
    lengths = [1 + 37 * i % 49 for i in range(30)]
    return Corpora([hand_made(folder / name, lengths[at:], vocab_size=VOCAB) for at, name in enumerate("ab")], [1, 2])


def train_packed_both_ways(folder: Path, parallel: ParallelConfig) -> list[Trained]:
    corpora = corpora_in(folder / str(dist.get_rank()))
    return [train(folder, corpora, packing, parallel) for packing in ("best-fit", "concatenated")]


def train(folder: Path, corpora: Corpora, packing: Packing, parallel: ParallelConfig) -> Trained:
    engine = build_engine(parallel, "adamw")
    mesh, records = engine.mesh, []
    config = settings(folder, packing, parallel, micro_batch_size(mesh))
    tiling = tiling_of(config, mesh)
    batches = build_batches(config, corpora, mesh, tiling)
    validation = Validation(batches, mesh, tiling, T, BATCH).measure(engine)
    validation["loss_by_corpus"] = [*validation["loss_by_corpus"].values()]  # each rank has a folder of its own
    by_hand = losses_by_hand(engine.module, batches) if dist.get_world_size() == 1 else ([], [])
    with prefetched(batches, range(STEPS), config.data.workers, mesh.device) as steps:
        for _, batch in steps:
            flops = sum(map(document_flops(engine.module.config), lengths_in(batch)))
            outcome = train_step(engine, batch, tiling, LR["adamw"], flops=flops)
            records.append((outcome.loss, outcome.grad_norm, outcome.flops))
    return Trained(validation, records, whole_weights(engine), by_hand)


def lengths_in(batch: list[MicroBatch]) -> list[int]:
    return [length for one in batch for length in one.document_lengths(T)]


def losses_by_hand(model: TostLM, batches: TrainingBatches) -> tuple[list[float], list[float]]:
    nats: dict[int, list[float]] = {end: [] for end in POSITION_ENDS}
    of_corpus: dict[int, list[float]] = {0: [], 1: []}
    corpora = batches.corpora_of(0)
    for number, (tokens, labels, cu_seqlens) in enumerate(micro_batches(batches[0], torch.device("cpu"))):
        samples = tokens.numel() // T
        log_p = model(tokens, cu_seqlens=cu_seqlens).logits.log_softmax(-1)
        starts = [0] if cu_seqlens is None else cu_seqlens.tolist()
        for row, column in (labels != IGNORED_LABEL).nonzero().tolist():
            position = column - max(start for start in starts if start <= column)
            end = next(end for end in POSITION_ENDS if position < end)
            nats[end].append(-log_p[row, column, labels[row, column]].item())
            of_corpus[int(corpora[number * samples + row + column // T])].append(nats[end][-1])
    by_position, by_corpus = ([sum(one) / len(one) for one in groups.values()] for groups in (nats, of_corpus))
    return by_position, by_corpus


def test_ranks_train_as_one_process(tmp_path: Path):
    expected = run_on_ranks(train_packed_both_ways, 1, tmp_path, ParallelConfig())[0]
    assert len({loss for one in expected for loss, *_ in one.records}) == 2 * STEPS
    packed, whole = ([flops for *_, flops in one.records] for one in expected)
    assert min(whole) == max(whole) > max(packed)
    for one in expected:
        assert one.validation["position_ends"] == POSITION_ENDS
        assert one.validation["loss"] == pytest.approx(one.records[0][0], rel=FLOAT32_REORDERED)
        by_position, by_corpus = one.by_hand
        assert one.validation["loss_by_position"] == pytest.approx(by_position, rel=FLOAT32_REORDERED)
        assert one.validation["loss_by_corpus"] == pytest.approx(by_corpus, rel=FLOAT32_REORDERED)
        assert abs(by_corpus[0] - by_corpus[1]) > 1e-3
    largest = {"tensor": 2, "sequence": 2, "zero_stage": 3}
    for ranks, layout in ((2, {}), (4, largest)):
        parallel = validate(ParallelConfig, layout, "test")
        for found in run_on_ranks(train_packed_both_ways, ranks, tmp_path, parallel):
            for here, true in zip(found, expected, strict=True):
                assert np.array(here.records) == pytest.approx(np.array(true.records), rel=FLOAT32_REORDERED)
                for name, weight in true.weights.items():
                    assert_close(here.weights[name], weight, FLOAT32_REORDERED, name)
                for key, value in true.validation.items():
                    assert here.validation[key] == pytest.approx(value, rel=FLOAT32_REORDERED), key
