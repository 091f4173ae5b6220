"""The benchmark of the whole model, small, as a user runs it."""

import json
from pathlib import Path

from programs import refusal, run

SMALL = ("shape.layers=1", "shape.width=8", "shape.heads=2", "bench.device=cpu")


def test_every_rival_is_measured_in_one_table(tmp_path: Path):
    said = run("benchmarks.model", *SMALL, "bench.lengths=[64]", cwd=tmp_path)
    (path,) = (tmp_path / "benchmarks/results").glob("model_*.json")
    cells = json.loads(path.read_text())["cells"]
    assert [(cell["work"], cell["rival"]) for cell in cells] == [
        (work, rival)
        for work in ("training step", "decoding a token")
        for rival in ("ToST", "GPT-2, flash attention", "GPT-2, plain attention")
    ]
    assert all(len(cell["seconds"]) == 7 and min(cell["seconds"]) > 0 for cell in cells)
    tost, *gpt2 = (cell["state_bytes"] for cell in cells[3:])
    assert tost < 4 * 64
    assert gpt2 == [64 * 2 * 8 * 4] * 2
    table = [line for line in said.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2
    assert "\n".join(table) in path.with_suffix(".md").read_text()


def test_a_length_that_takes_too_long_is_left_out_and_so_are_longer_ones(tmp_path: Path):
    run("benchmarks.model", *SMALL, "bench.lengths=[16, 32]", "bench.cell_seconds=0.1", cwd=tmp_path)
    (path,) = (tmp_path / "benchmarks/results").glob("model_*.json")
    failures = [(cell["tokens"], cell["failed"]) for cell in json.loads(path.read_text())["cells"]]
    assert failures == 2 * ([(16, "over 0.1 s")] * 3 + [(32, "–")] * 3)


def test_a_shape_that_is_none_is_refused_before_anything_is_measured(tmp_path: Path):
    assert "model.width 9 is not divisible by model.heads 2" in refusal(
        "benchmarks.model", *SMALL, "shape.width=9", cwd=tmp_path
    )
    assert not (tmp_path / "benchmarks").exists()
