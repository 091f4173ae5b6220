"""Test sets evaluated during training score as in one process, on any parallel layout; training is unchanged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_state import whole_weights
from torch import Tensor
from training_on_layouts import LR, T, build_engine, build_model, micro_batches

from tost_lm.config import validate
from tost_lm.data.tokenizers import SentencePieceTokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.inference.generation import ForeignFacts
from tost_lm.inference.ranks import Ranks
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile
from tost_lm.tasks.in_training import TasksInTraining
from tost_lm.tasks.task import Row
from tost_lm.testing import FLOAT32_REORDERED, run_on_ranks

PAGES = "".join(f" = Page {number} = \n \n" + " Some words , of a text . \n" * (3 + 2 * number) for number in range(3))
TASK = "wikitext2@hf-stride13"
SHAPE = {"layers": 2, "width": 192, "vocab_size": 576, "pattern": "TA", "softmax": {"window": 5}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A test set and a tokenizer."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "wiki.test.raw").write_text(PAGES)
    (folder / "tokenizer.model").write_bytes(train_sentencepiece([PAGES], 280))
    return folder


def find_tasks(folder: Path) -> TasksInTraining:
    tokenizer = SentencePieceTokenizer((folder / "tokenizer.model").read_bytes())
    sets, settings = {"wikitext2": folder / "wiki.test.raw"}, {"zero_shot": {"batch_tokens": 3 * T}}
    shards: Any = SimpleNamespace(folder=folder)
    return TasksInTraining.find([TASK], sets, settings, tokenizer, shards, ForeignFacts(T, None, "TA"))


def measured_alone(found: TasksInTraining, weights: dict[str, Tensor], shape: dict[str, Any]) -> list[Row]:
    model = build_model(**shape).eval()
    model.load_state_dict(weights)
    return [own.task.totals_of(own.measure(model, Ranks(), None)) for own in found.tasks]


def train(engine: Any, found: TasksInTraining | None, tile_tokens: int | None) -> list[list[Row]]:
    """Scores before and after a few steps."""
    mesh, measured, beats = engine.mesh, [], []
    tiling = tile(mesh, T, tile_tokens)
    for steps in (range(2), range(0)):
        if found:
            measured.append(found.measure(engine, lambda: beats.append(1)))
        for step in steps:
            train_step(engine, micro_batches(mesh, tiling, step), tiling, LR["adamw"])
    assert found is None or len(beats) > 4
    return measured


def measure_on(layouts: list[dict[str, Any]], folder: Path, bfloat16: bool, tied_head: bool) -> list[list[list[Row]]]:
    found, all_measured, shape = find_tasks(folder), [], {**SHAPE, "tied_head": tied_head}
    for layout in layouts:
        parallel = validate(ParallelConfig, layout, "test")
        engine, alone = (
            build_engine(parallel, "adamw", bfloat16=bfloat16, memory={"mlp_tile_tokens": 4}, **shape) for _ in range(2)
        )
        all_measured.append(train(engine, found, tile_tokens=9))
        train(alone, None, tile_tokens=9)
        weights = whole_weights(engine)
        for name, weight in whole_weights(alone).items():
            assert torch.equal(weights[name], weight), name
        relative = 1e-2 if bfloat16 else FLOAT32_REORDERED
        for row, expected in zip(all_measured[-1][-1], measured_alone(found, weights, shape), strict=True):
            for key in ("nats_per_token", "bits_per_byte"):
                assert row[key] == pytest.approx(expected[key], rel=relative), layout
            assert {key: row[key] for key in ("examples", "tokens")} == {
                key: expected[key] for key in ("examples", "tokens")
            }
    return all_measured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "bfloat16", "tied_head"),
    [
        ([{"sequence": 2, "zero_stage": 3}, {"zero_stage": 3}], False, False),
        ([{"tensor": 2, "sequence": 2, "zero_stage": 1}, {"tensor": 2, "zero_stage": 3}], True, True),
    ],
)
def test_four_ranks_score_as_one_process(folder: Path, layouts: list[dict[str, int]], bfloat16: bool, tied_head: bool):
    first, *others = run_on_ranks(measure_on, 4, layouts, folder, bfloat16, tied_head)
    assert others == [first] * 3
    for measured in first:
        (before,), (after,) = measured
        assert after["nats_per_token"] != pytest.approx(before["nats_per_token"], rel=1e-5)
