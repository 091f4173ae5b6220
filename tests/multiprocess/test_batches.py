"""Ranks that each read their own part of packed documents and of mixtures train as one process that reads all."""

from pathlib import Path

import torch
import torch.distributed as dist
from hand_made import hand_made
from torch import Tensor
from training_on_mixes import BATCH, LR, VOCAB, T, build_engine, micro_batch_sequences

from tost_lm.config import validate
from tost_lm.data.loader import Packing
from tost_lm.data.mixture import Corpora
from tost_lm.data.prefetch import prefetched
from tost_lm.parallel import zero
from tost_lm.parallel.apply import even_split
from tost_lm.parallel.config import ParallelConfig
from tost_lm.parallel.world import mean_over_ranks
from tost_lm.testing import assert_close, run_on_ranks
from tost_lm.training.config import PretrainConfig
from tost_lm.training.loop import build_batches, train_step

STEPS = 3
Trained = tuple[list[tuple[float, float]], dict[str, Tensor]]


def settings(folder: Path, packing: Packing, parallel: ParallelConfig, micro_batch: int) -> PretrainConfig:
    tree = {
        "model": {"layers": 1, "heads": 4, "width": 8, "vocab_size": VOCAB, "max_positions": T},
        "data": {"mixture": {str(folder / "a"): 2, str(folder / "b"): 1}, "packing": packing},
        "train": {"steps": STEPS, "batch_sequences": BATCH, "micro_batch_sequences": micro_batch, "sequence_tokens": T},
        "parallel": parallel.model_dump(),
        "run": {"name": "r"},
    }
    return validate(PretrainConfig, tree, "test")


def corpora_in(folder: Path) -> Corpora:
    lengths = [1 + 37 * i % 49 for i in range(30)]
    return Corpora([hand_made(folder / name, lengths[at:], vocab_size=VOCAB) for at, name in enumerate("ab")], [2, 1])


def train_packed_both_ways(folder: Path, parallel: ParallelConfig) -> list[Trained]:
    corpora = corpora_in(folder / str(dist.get_rank()))
    return [train(folder, corpora, packing, parallel) for packing in ("best-fit", "concatenated")]


def train(folder: Path, corpora: Corpora, packing: Packing, parallel: ParallelConfig) -> Trained:
    """Losses and gradient norms of some steps, and the weights in the end."""
    engine = build_engine(parallel, "adamw")
    mesh, records = engine.mesh, []
    config = settings(folder, packing, parallel, micro_batch_sequences(mesh))
    split = even_split(mesh, config.row_tokens)
    batches = build_batches(config, corpora, mesh, split)
    with prefetched(batches, range(STEPS), config.data.workers, mesh.device) as steps:
        for _, micro_batches in steps:
            loss = train_step(engine, micro_batches, split, LR["adamw"])
            records.append((mean_over_ranks(loss), float(engine.get_global_grad_norm())))
    return records, dict(zero.full_weights(engine))


def test_ranks_train_as_one_process(tmp_path: Path):
    expected = run_on_ranks(train_packed_both_ways, 1, tmp_path, ParallelConfig())[0]
    assert len({loss for records, _ in expected for loss, _ in records}) == 2 * STEPS
    for ranks, mix in ((2, {}), (2, {"sequence": 2}), (4, {"tensor": 2, "sequence": 2, "zero_stage": 3})):
        parallel = validate(ParallelConfig, mix, "test")
        for found in run_on_ranks(train_packed_both_ways, ranks, tmp_path, parallel):
            for (records, weights), (true_records, true_weights) in zip(found, expected, strict=True):
                torch.testing.assert_close(torch.tensor(records), torch.tensor(true_records), rtol=1e-5, atol=0)
                for name, weight in true_weights.items():
                    assert_close(weights[name], weight, 1e-5, name)
