"""The benchmark of the operator refuses what cannot be measured; tests/full runs it."""

from pathlib import Path

import pytest
import torch
from programs import refusal


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path):
    assert "bench.device = cuda: no CUDA device is available" in refusal(
        "benchmarks.operator", "bench.device=cuda", cwd=tmp_path
    )


def test_lengths_are_counts(tmp_path: Path):
    assert "bench.lengths" in refusal("benchmarks.operator", "bench.lengths=[0]", cwd=tmp_path)
