"""The benchmark of what ranks send each other, small, as a user runs it."""

import json
from pathlib import Path

from programs import refusal, run

SMALL = (
    "traffic.tokens=[64, 128]", "traffic.ranks=[2]", "traffic.heads=2", "traffic.channels=4",
    "traffic.count_up_to=64", "scaling.ranks=[2]", "scaling.tokens=16", "scaling.layers=2", "scaling.heads=2",
    "scaling.width=8", "scaling.vocab_size=8", "scaling.rounds=2",
)  # fmt: skip


def test_traffic_is_counted_beside_the_formulas_and_every_axis_is_trained(tmp_path: Path):
    said = run("benchmarks.parallel", *SMALL, cwd=tmp_path)
    (path,) = (tmp_path / "benchmarks/results").glob("parallel_*.json")
    cells = json.loads(path.read_text())["cells"]
    traffic = [cell for cell in cells if cell["work"] == "traffic"]
    assert [(cell["tokens"], cell["counted"]) for cell in traffic] == [(64, True), (128, False)]
    # Counted or not, the same: 8·(2C + H) bytes.
    assert [cell["bytes"]["TSSA, here"] for cell in traffic] == [{"sent": 144, "received": 144}] * 2
    # Of 128 tokens on 2 ranks a rank has 64 of 8 channels in 2 bytes: 1024 for its keys.
    assert traffic[1]["bytes"] == {
        "TSSA, here": {"sent": 144, "received": 144},
        "Ring Attention": {"sent": 6 * 1024, "received": 6 * 1024},
        "DeepSpeed Ulysses": {"sent": 8 * 1024, "received": 4 * 1024},
        "LASP-2": {"sent": 2 * 4 * 2 * 4 * 4, "received": 2 * 4 * 2 * 4 * 4},
    }
    scaling = {cell["axis"]: cell for cell in cells if cell["work"] == "scaling"}
    assert list(scaling) == ["data", "sequence", "tensor"]
    for axis, cell in scaling.items():
        assert [len(cell["seconds"][kind]) for kind in ("together", "alone")] == [2, 2]
        assert len(cell["exchange_shares"]) == (2 if axis == "sequence" else 0)
        assert cell["exchange_bytes"] == (2 * 144 if axis == "sequence" else 0)
    # Gradients and weights are exchanged along both alike; beside them are the layers' statistics.
    assert scaling["sequence"]["sent_bytes"] - scaling["data"]["sent_bytes"] == 2 * 144
    table = [line for line in said.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2 + 2 + 3
    written = path.with_suffix(".md").read_text()
    assert all(line in written for line in table)


def test_what_ranks_cannot_share_is_refused_before_anything_is_measured(tmp_path: Path):
    assert "model.heads 2 cannot be shared by parallel.tensor 3 ranks" in refusal(
        "benchmarks.parallel", *SMALL, "scaling.ranks=[3]", cwd=tmp_path
    )
    assert "every rank needs a token" in refusal("benchmarks.parallel", *SMALL, "traffic.tokens=[1]", cwd=tmp_path)
    assert not (tmp_path / "benchmarks").exists()
