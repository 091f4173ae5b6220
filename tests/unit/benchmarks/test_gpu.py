"""benchmarks.gpu, all of it with small sizes on the CPU."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import gpu
from benchmarks.gpu import LAYOUTS, PARTS, GpuBenchmarkConfig, compared
from benchmarks.measure import CHECKOUT, read_cells, results_file
from benchmarks.tuning import try_share
from tost_lm.errors import TostError

OTHERS = ("deepspeed", "megatron", "fla", "datasets", "wandb", "tqdm", "hypothesis")
VICTIM = "decoding"


def results_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = (folder / "results/benchmarks").glob("gpu_*.json")
    record = json.loads(path.read_text())
    assert path.name == results_file("gpu", record["machine"]["device"]).name
    table = path.with_suffix(".md").read_text()
    assert all(f"| {cell['part']} " in table for cell in record["cells"])
    return record["cells"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_runs_and_one_that_crashes_ends_no_other(tmp_path: Path):
    words = [sys.executable, "-m", "benchmarks.gpu", "gpu.device=cpu", "gpu.budget_minutes=60"]
    # Compiling takes minutes on a CPU.
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{sys.prefix}/fla", "TORCHDYNAMO_DISABLE": "1"}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith(f"{VICTIM}, for at most"):
                while not read_cells(tmp_path / gpu.cells_file(VICTIM)):
                    time.sleep(0.01)
                (part,) = psutil.Process(program.pid).children()
                part.send_signal(signal.SIGSEGV)
    assert program.returncode == 0
    cells = results_of(tmp_path)
    assert list(dict.fromkeys(cell["part"] for cell in cells)) == list(PARTS)
    *_, crashed = [cell for cell in cells if cell["part"] == VICTIM]
    others = [cell for cell in cells if cell is not crashed]
    assert crashed["failed"] == "ended by SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in crashed["traceback"]
    for cell in others:  # files of tests/gpu skip themselves here, which pytest calls no tests
        assert "failed" not in cell or (cell["part"] == "tests" and "skipped" in cell["beside"]), cell
    by_case = {cell.get("case"): cell for cell in others}
    for layout in LAYOUTS.keys() - {"one rank"}:
        assert by_case[layout]["value"].startswith("losses differ by ")
    assert "error: rank 1 (" in by_case["rank 1 killed"]["value"]
    step = by_case["tost-base, compiled"]
    assert sum(seconds for seconds, _ in step["classes"].values()) == pytest.approx(step["kernel_seconds"])
    assert {"matrix products", "token mixers", "loss", "optimizer"} <= step["classes"].keys()
    for case in ("A, 1 × 64 tokens", "DDDA, 2 × 128 tokens"):
        assert by_case[case]["value"].endswith("a plain loop")
    assert by_case["delta-1b"]["tokens"] == by_case["delta-350m, 131,072 tokens in tiles"]["tokens"] == 4 * 64
    assert by_case["tost-base, compiled, DeepSpeed"]["losses"] == pytest.approx(step["losses"], rel=1e-3)


@pytest.mark.slow
def test_without_other_packages_steps_are_those_of_fully_shard(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({OTHERS}))\n")
    words = ["gpu.device=cpu", 'gpu.parts=["training step", "two ranks"]']
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{CHECKOUT}", "OMP_NUM_THREADS": "1"}
    environment["TORCHDYNAMO_DISABLE"] = "1"
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *steps, ranks = results_of(tmp_path)
    assert [cell.get("failed") for cell in steps] == [None] * 4
    assert ranks["failed"] == "not tried: megatron-core is not installed"


@pytest.mark.slow
def test_without_a_gpu_the_error_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(TostError, match=r"^gpu\.device = cuda: .*set gpu\.device=cpu"):
        gpu.main(None, GpuBenchmarkConfig())


def test_losses_that_differ_fail():
    assert "failed" not in compared([6.0, 5.0], [6.0, 5.004])
    assert compared([6.0, 5.0], [6.0, 5.006])["failed"] == "losses differ by 1.2e-03"
    assert "failed" in compared([6.0, float("nan")], [6.0, 5.0])


def test_processes_share_the_variants_of_a_kernel(monkeypatch: pytest.MonkeyPatch):
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    every = autotuner.prune_configs
    tuner = SimpleNamespace(configs=list(range(5)), early_config_prune=None, perf_model=None, nargs={"x": 1})
    tuner._bench = lambda x, config: [math.inf] * 3 if config in (0, 2) else [1.0] * 3
    shares = []
    for index in range(3):
        monkeypatch.setattr(autotuner, "prune_configs", every)
        try_share(index, 3)
        shares.append(autotuner.prune_configs(tuner, {}))
    assert shares == [[0, 3], [1, 4], [1]]  # 0 and 2 do not run
    tuner.configs = ["the only one"]
    assert autotuner.prune_configs(tuner, {}) == ["the only one"]
