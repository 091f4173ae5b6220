"""The benchmark of the operator, small, as a user runs it."""

import json
from pathlib import Path

import pytest
import torch
from programs import refusal, run


def test_every_rival_is_measured_in_one_table(tmp_path: Path):
    said = run(
        "benchmarks.operator", "shape.heads=2", "shape.channels=8", "bench.device=cpu", "bench.lengths=[4096]",
        cwd=tmp_path, TORCHDYNAMO_DISABLE="1",  # compiling is torch's affair, and most of a minute
    )  # fmt: skip
    (path,) = (tmp_path / "benchmarks/results").glob("operator_*.json")
    copy, *cells = json.loads(path.read_text())["cells"]
    assert copy["bytes_per_second"] > 1e8
    rivals = ("causal TSSA", "naive", "naive, compiled", "softmax attention")
    assert [(cell["work"], cell["rival"]) for cell in cells] == [
        (work, rival) for work in ("forward", "forward + backward") for rival in rivals
    ]
    assert all(len(cell["seconds"]) == 7 and min(cell["seconds"]) > 0 for cell in cells)
    assert all(cell["w_bytes"] == 4096 * 16 * 4 for cell in cells)
    table = [line for line in said.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2
    assert "× time" in table[-1]
    assert "\n".join(table) in path.with_suffix(".md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path):
    assert "bench.device = cuda: there is no CUDA device" in refusal(
        "benchmarks.operator", "bench.device=cuda", cwd=tmp_path
    )


def test_lengths_are_counts(tmp_path: Path):
    assert "bench.lengths" in refusal("benchmarks.operator", "bench.lengths=[0]", cwd=tmp_path)
