"""The loss by position as a user runs it: one process, copies of the model, a parallel layout, and mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import run

from tost_lm.testing import FLOAT32_REORDERED


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/tiny, a model without a maximum length, trained on 32 tokens."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "out").symlink_to(prepared / "out")
    words = ["model.positions=none", "model.tssa.denom_bias=head", "train.steps=2"]
    run("tost train", prepared / "run.toml", *words, cwd=folder)
    return folder


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs/tiny/eval/positions/results.json").read_text())


def test_ranks_measure_the_same_as_one_process(trained: Path):
    words = ["runs/tiny", "positions", "positions.times=8", "positions.sequences=3"]
    output = run("tost eval", *words, cwd=trained)
    alone = results(trained)
    assert [row["end"] for row in alone["by_position"] if row["trained"]] == [8, 16, 32, 64]
    assert [row["end"] for row in alone["by_position"] if not row["trained"]] == [128, 256, 512]
    assert "reading 3 sequences of 512 tokens\n" in output
    assert "wrote runs/tiny/eval/positions/results.json" in output
    tolerances = {"end": 0, "trained": 0, "nats_per_token": FLOAT32_REORDERED, "standard_error": 1e-3}
    for layout in ("parallel.sequence=2", "parallel.tensor=1"):  # the latter: two copies share three sequences
        (trained / "runs/tiny/eval/positions/results.json").unlink()
        output = run("tost eval", *words, layout, cwd=trained, ranks=2)
        assert output.count("trained length") == 1
        found = results(trained)
        assert found["identity"] == alone["identity"]
        for row, expected in zip(found["by_position"], alone["by_position"], strict=True):
            for key, relative in tolerances.items():
                assert row[key] == pytest.approx(expected[key], rel=relative), key
    assert "reusing runs/tiny/eval/positions/results.json" in run("tost eval", *words, cwd=trained)
