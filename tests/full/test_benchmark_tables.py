"""The benchmarks, small: processes of their own, and one table."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long, precision, training
from benchmarks.precision import losses
from tost_lm.config import Section, load_config, validate

BENCH = {"device": "cpu"}
SHAPE = {"layers": 1, "heads": 2, "width": 16, "vocab_size": 64}

Measure = Callable[[Any, type[Section], dict[str, Any]], tuple[list[dict[str, Any]], list[str]]]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Measure:
    """Runs a benchmark; returns its cells and the printed lines of tables, which are also in its file of results."""
    monkeypatch.chdir(tmp_path)

    def measure(benchmark: Any, config: type[Section], tree: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
        benchmark.main(None, validate(config, tree, "test"))
        (path,) = (tmp_path / "benchmarks/results").glob("*.json")
        printed, written = (
            [line for line in text.splitlines() if line.startswith("|")]
            for text in (capsys.readouterr().out, path.with_suffix(".md").read_text())
        )
        assert printed == written
        return json.loads(path.read_text())["cells"], written

    return measure


def test_the_training_step_and_the_engine(measure: Measure, tmp_path: Path):
    shapes = {name: {**SHAPE, "vocab_size": 384, "tokens": 64} for name in ("small", "long", "large")}
    tree = {**shapes, "bench": {**BENCH, "rounds": 3, "engine_steps": 12}}
    (*steps, engine), _ = measure(training, training.TrainingBenchmarkConfig, tree)
    for cell in steps:
        assert {name: len(seconds) for name, seconds in cell["seconds"].items()} == dict.fromkeys(
            (
                training.OURS, training.COMPILED, training.LOOP, training.PLAIN, training.PLAIN_COMPILED,
                training.WITHOUT,
            ),
            3,
        )  # fmt: skip
    assert len(engine["save_seconds"]) == 4
    assert len(engine["step_seconds"]) + len(engine["steps_while_writing"]) == 12 - 3 - 1
    assert engine["checkpoint_bytes"] > 12 * (384 + 64) * 16
    assert "## The engine" in next(tmp_path.rglob("training_*.md")).read_text()


def test_tiles_beside_whole_rows(measure: Measure):
    bench = {**BENCH, "lengths": [64, 256, 512], "tile_tokens": 32, "rounds": 2, "turn_tokens": 256}
    (*cells, turns), table = measure(long, long.LongBenchmarkConfig, {"shape": SHAPE, "bench": bench})
    assert [(cell["tokens"], cell["rival"]) for cell in cells] == [
        (tokens, rival) for tokens in (64, 256, 512) for rival in (long.TILES, long.WHOLE)
    ]
    assert all(cell["seconds"] > 0 and cell["peak_bytes"] > 1e8 for cell in cells)
    assert {length: len(seconds) for length, seconds in turns["turns"]["seconds"].items()} == {"64": 2, "256": 2}
    assert len(table) == 2 + 3


def test_precision_and_a_plain_loop_that_trains_as_deepspeed(monkeypatch: pytest.MonkeyPatch):
    settings = ["train.steps=4", "train.warmup_steps=1", "train.lr=1e-2", "train.seq_len=32", "train.batch=2"]
    settings += ["train.seeds=1", "shape.layers=1", "shape.heads=2", "shape.width=32", "layer_scales=[1e-4]"]
    config = load_config(precision.PrecisionBenchmarkConfig, None, settings)
    (_, *cells), text = precision.run(config, "cpu")
    assert "limit 2%: met" in text
    assert "limit 1%: met" in text
    assert "in bfloat16" in text

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for cell, (dtype, limit) in zip(cells, (("float32", 1e-6), ("bfloat16", 1e-3)), strict=True):
        train = {**config.train.model_dump(), "seed": 0, "dtype": dtype}
        plain = losses("cpu", precision.model_settings(config), train)
        assert plain["losses"][-1] < plain["losses"][0] - 0.05
        assert plain["losses"] == pytest.approx(cell["losses"], rel=limit)
