"""The benchmark of what ranks send each other, small, with its ranks forked from the tests' server."""

import json
from pathlib import Path

import pytest

from benchmarks import parallel
from tost_lm.config import validate
from tost_lm.errors import ConfigError

TRAFFIC = {"tokens": [64, 128], "ranks": [2], "heads": 2, "channels": 4, "count_up_to": 64}
SCALING = {"ranks": [2], "tokens": 16, "layers": 2, "heads": 2, "width": 8, "vocab_size": 8, "rounds": 2}


def run(**changed: dict[str, list[int]]) -> None:
    tree = {"traffic": {**TRAFFIC, **changed.get("traffic", {})}, "scaling": {**SCALING, **changed.get("scaling", {})}}
    parallel.main(None, validate(parallel.ParallelBenchmarkConfig, tree, "test"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "benchmarks"


@pytest.mark.slow
def test_traffic_is_counted_beside_the_formulas_and_every_axis_is_trained(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    run()
    (path,) = (folder / "results").glob("parallel_*.json")
    cells = json.loads(path.read_text())["cells"]
    traffic = [cell for cell in cells if cell["work"] == "traffic"]
    assert [(cell["tokens"], cell["counted"]) for cell in traffic] == [(64, True), (128, False)]
    # Counted or not, the same: 8·(2C + H) bytes.
    assert [cell["bytes"]["TSSA, tost_lm"] for cell in traffic] == [{"sent": 144, "received": 144}] * 2
    # Of 128 tokens on 2 ranks a rank has 64 of 8 channels in 2 bytes: 1024 for its keys.
    assert traffic[1]["bytes"] == {
        "TSSA, tost_lm": {"sent": 144, "received": 144},
        "Ring Attention": {"sent": 6 * 1024, "received": 6 * 1024},
        "DeepSpeed Ulysses": {"sent": 8 * 1024, "received": 4 * 1024},
        "LASP-2": {"sent": 2 * 4 * 2 * 4 * 4, "received": 2 * 4 * 2 * 4 * 4},
    }
    scaling = {cell["axis"]: cell for cell in cells if cell["work"] == "scaling"}
    assert list(scaling) == ["data", "sequence", "tensor"]
    for axis, cell in scaling.items():
        assert [len(cell["seconds"][kind]) for kind in ("together", "alone")] == [2, 2]
        assert len(cell["exchange_fractions"]) == (2 if axis == "sequence" else 0)
        assert cell["exchange_bytes"] == (2 * 144 if axis == "sequence" else 0)
    # Gradients and weights are exchanged along both alike; beside them are the layers' statistics.
    assert scaling["sequence"]["sent_bytes"] - scaling["data"]["sent_bytes"] == 2 * 144
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2 + 2 + 3
    written = path.with_suffix(".md").read_text()
    assert all(line in written for line in table)


def test_what_ranks_cannot_share_is_refused_before_anything_is_measured(folder: Path):
    with pytest.raises(ConfigError, match=r"model\.heads 2 is not divisible by parallel\.tensor 3"):
        run(scaling={"ranks": [3]})
    with pytest.raises(ConfigError, match="give each rank at least one token"):
        run(traffic={"tokens": [1]})
    assert not folder.exists()
