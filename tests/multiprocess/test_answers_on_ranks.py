"""Of shards with a loss mask, ranks that train in tiles have the losses and gradients of one process: torch's own."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_state import whole_weights
from hand_made import hand_made
from torch import Tensor
from torch.nn.functional import cross_entropy
from training_on_layouts import BATCH, LR, VOCAB, T, build_engine, build_model, exact_gradients, micro_batch_size

from tost_lm.config import validate
from tost_lm.data.loader import BatchShard, Corpora, TrainingBatches
from tost_lm.data.prefetch import MicroBatch, micro_batches
from tost_lm.data.stages import Packing
from tost_lm.errors import DataError
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.parallel.apply import parallelize
from tost_lm.parallel.mesh import all_reduce
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.batches import build_batches, tiling_of
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile
from tost_lm.pretrain.validation import Validation
from tost_lm.testing import FLOAT32_REORDERED, assert_close, run_on_ranks

STEPS = 3
PACKINGS: tuple[Packing, ...] = ("best-fit", "concatenated")
MODEL = {"softmax": {"window": 7}, "z_loss": 0.1}
LENGTHS = [1 + 37 * i % 49 for i in range(30)]


def corpora_in(folder: Path) -> Corpora:
    """Plain documents, and three times as many in which the last tokens of every third count."""
    ends = np.cumsum(LENGTHS)
    answers = [range(end - 1 - length // 4, end) for end, length in zip(ends[::3], LENGTHS[::3], strict=True)]
    mask = np.zeros(sum(LENGTHS), np.uint8)
    mask[[*np.concatenate(answers)]] = 1
    masked = hand_made(folder / "a", LENGTHS, vocab_size=VOCAB, loss_mask=mask)
    return Corpora([masked, hand_made(folder / "b", LENGTHS[9:], vocab_size=VOCAB)], [3, 1])


def whole_batches(folder: Path, packing: Packing, step: int) -> list[MicroBatch]:
    """The micro-batches of one process."""
    columns = (0, 2 * T if packing == "best-fit" else T)
    batches = TrainingBatches(
        corpora_in(folder), BatchShard(0, 1, (columns,)), packing=packing, seed=0, seq_len=T,
        global_batch_size=BATCH, micro_batch_size=2, ignored_label=IGNORED_LABEL,
    )  # fmt: skip
    return micro_batches(batches[step], torch.device("cpu"))


def by_torch(batches: list[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss without and gradients with z-loss, of whole logits."""
    model = build_model(**MODEL).double()
    labels = torch.cat([batch.labels.flatten() for batch in batches])
    logits = torch.cat([model(batch.tokens, cu_seqlens=batch.cu_seqlens).logits.flatten(0, 1) for batch in batches])
    loss = cross_entropy(logits, labels, ignore_index=IGNORED_LABEL)
    z = 0.1 * logits[labels != IGNORED_LABEL].logsumexp(-1).square().mean()
    (loss + z).backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Found(NamedTuple):
    loss: Tensor
    """Of the first step, in float64, as `gradients`."""
    gradients: dict[str, Tensor]
    counted: list[list[int]]
    """Labels of each micro-batch of each step on this rank."""
    validation: dict[str, Any]
    records: list[tuple[float, float]]
    """Loss and gradient norm of each step, in float32."""
    weights: dict[str, Tensor]


def train(folder: Path, parallel: ParallelConfig, tile_tokens: int | None, packing: Packing) -> Found:
    folder = folder / str(dist.get_rank())
    engine = build_engine(parallel, "adamw", **MODEL)
    mesh, corpora = engine.mesh, corpora_in(folder)
    tree = {
        "model": {"layers": 1, "heads": 4, "width": 8, "vocab_size": VOCAB, "max_positions": T},
        "data": {"mixture": {str(folder / "a"): 3, str(folder / "b"): 1}, "packing": packing},
        "train": {"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": micro_batch_size(mesh), "seq_len": T},
        "memory": {"tile_tokens": tile_tokens},
        "parallel": parallel.model_dump(),
        "run": {"name": "r"},
    }
    config = validate(PretrainConfig, tree, "test")
    tiling = tiling_of(config, mesh)
    assert (len(tiling.tiles) > 1) == (tile_tokens is not None)
    batches = build_batches(config, corpora, mesh, tiling)
    of_steps = [micro_batches(batches[step], mesh.device) for step in range(STEPS)]

    exact = parallelize(build_model(**MODEL).double(), mesh)
    count = all_reduce(sum((batch.labels != IGNORED_LABEL).sum() for batch in of_steps[0]), mesh.replicas)  # pyright: ignore[reportArgumentType]
    loss, gradients = exact_gradients(exact, mesh, of_steps[0], tiling, count)

    validation = Validation(batches, mesh, tiling, T, BATCH).measure(engine)
    validation["loss_by_corpus"] = [*validation["loss_by_corpus"].values()]  # each rank has a folder of its own
    outcomes = [train_step(engine, batch, tiling, LR["adamw"]) for batch in of_steps]
    records = [(outcome.loss, outcome.grad_norm) for outcome in outcomes]
    counted = [[int((batch.labels != IGNORED_LABEL).sum()) for batch in step] for step in of_steps]
    return Found(loss, gradients, counted, validation, records, whole_weights(engine))


def train_both(folder: Path, parallel: ParallelConfig, tile_tokens: int | None) -> list[Found]:
    return [*map(partial(train, folder, parallel, tile_tokens), PACKINGS)]


def test_two_by_two_ranks_in_tiles_have_the_losses_of_one_process(tmp_path: Path):
    parallel = validate(ParallelConfig, {"sequence": 2, "zero_stage": 2}, "test")
    expected = run_on_ranks(train_both, 1, tmp_path, ParallelConfig(), None)[0]
    on_ranks = run_on_ranks(train_both, 4, tmp_path, parallel, 9)
    nothing = [counts for rank in on_ranks for one in rank for step in one.counted for counts in step if not counts]
    assert nothing  # a rank has a micro-batch in which no token counts
    for at, packing in enumerate(PACKINGS):
        true = expected[at]
        loss, gradients = by_torch(whole_batches(tmp_path, packing, 0))
        assert true.records[0][0] == pytest.approx(loss.item(), rel=FLOAT32_REORDERED)
        assert true.validation["loss"] == pytest.approx(loss.item(), rel=FLOAT32_REORDERED)
        assert true.validation["tokens"] == sum(true.counted[0]) < BATCH * T / 2
        for here in (true, *(rank[at] for rank in on_ranks)):
            assert_close(here.loss, loss, 1e-10, packing)
            assert here.gradients.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert_close(here.gradients[name], gradient, 1e-10, f"{name}, {packing}")
            assert np.array(here.records) == pytest.approx(np.array(true.records), rel=FLOAT32_REORDERED)
            for name, weight in true.weights.items():
                assert_close(here.weights[name], weight, FLOAT32_REORDERED, name)
            for key, value in true.validation.items():
                found, one_process = (
                    np.array(here.validation[key], float),
                    np.array(value, float),
                )  # None: nothing counts
                assert found == pytest.approx(one_process, rel=FLOAT32_REORDERED, nan_ok=True), key


def without_labels(folder: Path) -> tuple[float, float, str, bool]:
    """A step in which no token counts, after one in which some do; and a validation."""
    engine = build_engine(ParallelConfig(), "adamw")
    tokens, labels = torch.randint(VOCAB, (2, 2, T), generator=torch.Generator().manual_seed(0)).unbind()
    tiling = tile(engine.mesh, T)
    train_step(engine, [MicroBatch(tokens, labels)], tiling, LR["adamw"])
    before = whole_weights(engine)
    ignored = MicroBatch(tokens, torch.full_like(labels, IGNORED_LABEL))
    outcome = train_step(engine, [ignored], tiling, LR["adamw"])
    unchanged = all(torch.equal(before[name], x) for name, x in whole_weights(engine).items())

    masked = hand_made(
        folder / str(dist.get_rank()), LENGTHS, vocab_size=VOCAB, loss_mask=np.zeros(sum(LENGTHS), np.uint8)
    )
    batches = TrainingBatches(
        Corpora([masked], [1.0]), BatchShard(engine.mesh.data.rank, 2, ((0, T),)), packing="concatenated", seed=0,
        seq_len=T, global_batch_size=BATCH, micro_batch_size=2, ignored_label=IGNORED_LABEL,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"validation\.sequences: no token of these .* counts in the loss; raise it"):
        Validation(batches, engine.mesh, tiling, T, BATCH).measure(engine)
    return outcome.loss, outcome.grad_norm, outcome.reason_to_skip, unchanged


def test_a_step_in_which_no_token_counts_is_skipped_and_such_a_validation_refused(tmp_path: Path):
    for found in run_on_ranks(without_labels, 2, tmp_path):
        assert found == (0.0, 0.0, "no token of the batch counts in the loss", True)
