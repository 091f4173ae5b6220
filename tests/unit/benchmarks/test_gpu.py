"""benchmarks.gpu with small sizes on the CPU, and the plan that takes its constants from the results."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import PARTS, GpuBenchmarkConfig
from benchmarks.measure import CHECKOUT
from tost_lm.config import load_config
from tost_lm.errors import ConfigError, TostError
from tost_lm.training.plan_config import PlanConfig, results_file

SMALL = [
    "gpu.device=cpu", "shape.layers=1", "shape.width=32", "shape.heads=2", "shape.vocab_size=256",
    "lengths.operator=[64, 512]", "lengths.training=[64]", "lengths.tiled=[512]", "lengths.tile_tokens=128",
    "lengths.batch_tokens=128", "lengths.precision_steps=2", "lengths.decoded=2",
]  # fmt: skip
OTHERS = ("hjson", "megatron", "sentencepiece", "psutil", "datasets", "wandb", "tqdm", "hypothesis", "tokenizers")
WITHOUT_OTHERS = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({OTHERS}))
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


@pytest.mark.timeout(600)
def test_every_part_runs_with_the_named_packages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command = [sys.executable, "-c", WITHOUT_OTHERS, *SMALL]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "benchmarks/results").glob("gpu_*.json")
    record = json.loads(path.read_text())
    assert path.name == results_file("gpu", record["machine"]["device"]).name
    cells = record["cells"]
    assert [cell for cell in cells if "failed" in cell] == []
    assert list(dict.fromkeys(cell["part"] for cell in cells)) == list(PARTS)
    assert any("plain loop" in cell["case"] for cell in cells)
    table = path.with_suffix(".md").read_text()
    assert all(f"| {part} " in table for part in PARTS)

    monkeypatch.chdir(tmp_path)
    gpu.main(None, load_config(GpuBenchmarkConfig, None, [*SMALL, 'gpu.parts=["decoding"]']))
    both = json.loads(path.read_text())["cells"]
    assert [cell for cell in both if cell["part"] != "decoding"] == [c for c in cells if c["part"] != "decoding"]
    assert [cell["case"] for cell in both if cell["part"] == "decoding"] == ["a token after 64"]


def test_missing_packages_are_named_with_the_way_to_bring_them():
    done = subprocess.run(
        [sys.executable, "-S", "-m", "benchmarks.gpu"], cwd=CHECKOUT, env={}, capture_output=True, text=True
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: packages are missing: torch, triton, numpy, pytest, ")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"pip download -d wheels --only-binary=:all: --python-version {version} torch triton" in line


def test_without_a_gpu_the_error_names_the_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"set gpu\.device=cpu"):
        gpu.main(None, GpuBenchmarkConfig())


def test_a_part_ends_at_the_time_limit_and_at_a_failure():
    def cells():
        yield {"case": "first"}
        raise MemoryError("no more\nof it")

    late = time.monotonic() - 1
    assert [cell["failed"] for cell in gpu._guarded(cells(), late)] == ["not begun: gpu.budget_minutes is over"]
    measured = list(gpu._guarded(cells(), time.monotonic() + 60))
    assert [cell.get("failed") for cell in measured] == [None, "MemoryError: no more"]
    assert "in cells" in measured[1]["traceback"]
    assert gpu.row({"part": "loss", **measured[1]})["value"] == "MemoryError: no more"


def test_an_error_that_loses_the_device_names_the_missing_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.gpu_parts.context_is_lost", lambda device: True)
    config = load_config(GpuBenchmarkConfig, None, [*SMALL, 'gpu.parts=["loss", "decoding"]'])
    with pytest.raises(TostError, match=r"gpu\.parts='\[\"decoding\"\]'"):
        gpu.main(None, config)


def test_a_plan_takes_its_constants_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    recipe = CHECKOUT / "configs/pretrain/owt_tost_base.toml"
    plan = lambda *words: load_config(PlanConfig, recipe, ["cluster.preset=h200-sxm", *words]).cluster
    assert plan().achieved_flops == 0.4
    path = results_file("gpu", "NVIDIA H200")
    assert path == Path("benchmarks/results/gpu_nvidia-h200.json")
    path.parent.mkdir(parents=True)
    cells = [
        {"part": "device", "case": "copy", "bytes_per_second": 3.6e12},
        {"part": "device", "case": "matrix product of an MLP", "flops_per_second": 5e14, "of_peak": 0.5},
        {"part": "device", "case": "launch of an operation", "seconds": 3e-6},
    ]
    path.write_text(json.dumps({"cells": cells}))
    cluster = plan("cluster.launch_us=9")
    assert (cluster.achieved_flops, cluster.achieved_memory_bandwidth, cluster.launch_us) == (0.5, 0.75, 9)
    assert cluster.achieved_bandwidth == 0.7  # of links and network, which one GPU does not show
    assert plan("cluster.preset=h100-sxm").achieved_flops == 0.4
    path.write_text(json.dumps({"cells": cells[:1]}))
    with pytest.raises(ConfigError, match=r"no complete result of benchmarks\.gpu"):
        plan()
