"""The benchmark of the whole model where rivals fail; tests/full measures all of them."""

import json
from pathlib import Path

from programs import run

SMALL = ("shape.layers=1", "shape.width=8", "shape.heads=2", "bench.device=cpu")


def test_a_length_that_takes_too_long_is_left_out_and_so_are_longer_ones(tmp_path: Path):
    run("benchmarks.model", *SMALL, "bench.lengths=[16, 32]", "bench.cell_seconds=0.1", cwd=tmp_path)
    (path,) = (tmp_path / "benchmarks/results").glob("model_*.json")
    failures = [(cell["tokens"], cell["failed"]) for cell in json.loads(path.read_text())["cells"]]
    assert failures == 2 * ([(16, "over 0.1 s")] * 3 + [(32, "–")] * 3)
