"""benchmarks.gpu with small sizes on the CPU, and the plan that takes its constants from the results."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu, precision_cells
from benchmarks.engine import packed_batches
from benchmarks.gpu_parts import SLOW_CALL_S, measured, operator_tests
from benchmarks.gpu_settings import PARTS, GpuBenchmarkConfig
from benchmarks.measure import CHECKOUT
from tost_lm.config import EXIT_INTERRUPTED, load_config
from tost_lm.errors import ConfigError, TostError
from tost_lm.pretrain.plan.settings import PlanConfig, results_file

SMALL = [
    "gpu.device=cpu", "gpu.budget_minutes=60",
    "shape.layers=1", "shape.width=32", "shape.heads=2", "shape.vocab_size=256",
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
    environment["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes a minute
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "benchmarks/results").glob("gpu_*.json")
    record = json.loads(path.read_text())
    assert path.name == results_file("gpu", record["machine"]["device"]).name
    cells = record["cells"]
    assert [cell for cell in cells if "failed" in cell] == []
    *parts, of_gpus = PARTS
    assert of_gpus == "linear attention"
    assert list(dict.fromkeys(cell["part"] for cell in cells)) == parts
    for part, case in (
        ("softmax layer", "a window, packed documents, shared keys: gradient of k_norm.weight, float32"),
        ("operator", "slot memory, 2 × 64 tokens, forward + backward"),
        ("packed training step", "SSSA, 16 × 64 tokens, 17 documents, plain loop"),
        ("compiled training step", "DDDA, 16 × 64 tokens, 17 documents, plain loop"),
        ("training step", "2 × 64 tokens, plain loop"),
    ):
        assert case in [cell["case"] for cell in cells if cell["part"] == part]
    table = path.with_suffix(".md").read_text()
    assert all(f"| {part} " in table for part in parts)

    monkeypatch.chdir(tmp_path)
    gpu.main(None, load_config(GpuBenchmarkConfig, None, [*SMALL, 'gpu.parts=["decoding"]']))
    both = json.loads(path.read_text())["cells"]
    assert [cell for cell in both if cell["part"] != "decoding"] == [c for c in cells if c["part"] != "decoding"]
    assert [cell["case"] for cell in both if cell["part"] == "decoding"] == ["a token after 64"]


def test_a_wrong_softmax_layer_is_reported(monkeypatch: pytest.MonkeyPatch):
    formula, call = (
        precision_cells._softmax_formula,
        ("cpu", {"layers": 1, "heads": 2, "width": 32, "softmax": {"window": 8}}),
    )

    def with_a_shorter_window(layer, x, info):
        layer.window -= 1
        y = formula(layer, x, info)
        layer.window += 1
        return y

    right = list(precision_cells.softmax_errors(*call, "float32", [20, 64]))
    assert [row["tensor"] for row in right if "failed" not in row] == [
        "output", "gradient of x", "gradient of in_proj.weight", "gradient of out_proj.weight",
    ]  # fmt: skip
    monkeypatch.setattr(precision_cells, "_softmax_formula", with_a_shorter_window)
    assert all("failed" in row for row in precision_cells.softmax_errors(*call, "float32", [20, 64]))


def test_packed_samples_are_full_of_documents_that_differ_between_batches():
    one, other = packed_batches(2, 16, 1024, 64, "cpu")
    assert one.cu_seqlens is not None
    assert other.cu_seqlens is not None
    for ends in (one.cu_seqlens.tolist(), other.cu_seqlens.tolist()):
        assert ends == sorted(set(ends))
        assert {*range(0, 16 * 1024 + 1, 1024)} < {*ends}
    assert one.tokens.shape == one.labels.shape == (1, 16 * 1024)
    assert one.cu_seqlens.tolist() != other.cu_seqlens.tolist()


def test_compilation_in_the_first_call_is_not_measured():
    durations = iter([SLOW_CALL_S])
    seconds, _ = measured(lambda: time.sleep(next(durations, 0)), "cpu")
    assert seconds < SLOW_CALL_S / 2


HANGING = """
import fcntl, subprocess, time
from pathlib import Path

def test_that_hangs():
    held = open({held!r}, "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    subprocess.Popen(["sleep", "1000"], pass_fds=[held.fileno()])
    Path({began!r}).touch()
    time.sleep(1000)
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A file that exists once the operator's tests hang, and one that they and a process of theirs have locked."""
    monkeypatch.chdir(tmp_path)
    began, held, test = tmp_path / "began", tmp_path / "held", tmp_path / "test_hanging.py"
    test.write_text(HANGING.format(held=str(held), began=str(began)))
    monkeypatch.setenv("PYTEST_ADDOPTS", str(test))
    return began, held


def assert_ended_and_stored(held: Path) -> None:
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for each process that has it
    (output,) = Path("benchmarks/results").glob("gpu_*.tests.txt")
    assert "::test_that_hangs" in output.read_text()


def test_tests_that_hang_are_ended_at_the_time_limit(hanging: tuple[Path, Path]):
    began, held = hanging
    for limit_s in (4, 16, 64):  # until it is long enough for pytest to start
        (cell,) = operator_tests(GpuBenchmarkConfig(), "cpu", time.monotonic() + limit_s)
        assert f"not finished after {limit_s} s: no test ran; see benchmarks/results/gpu_" in cell["failed"]
        if began.exists():
            break
    assert_ended_and_stored(held)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_tests_end_when_the_benchmark_is_interrupted(hanging: tuple[Path, Path], signum: signal.Signals):
    began, held = hanging
    command = [sys.executable, "-m", "benchmarks.gpu", "gpu.device=cpu", 'gpu.parts=["operator tests"]']
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as benchmark:
        while not began.exists():
            assert benchmark.poll() is None
            time.sleep(0.1)
        benchmark.send_signal(signum)
        _, errors = benchmark.communicate()
    assert benchmark.returncode == EXIT_INTERRUPTED, errors
    assert_ended_and_stored(held)


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
    assert plan().achieved_flops == 0.7
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
    assert plan("cluster.preset=h100-sxm").achieved_flops == 0.7
    assert plan().launch_us == pytest.approx(3)
    step = {"part": "training step", "case": "a step", "launches": 900, "copies": 100, "seconds": 0.04}
    for kernel_seconds, launch_us in ((0.01, 40), (0.039, 3)):  # the GPU waits for the host, and does not
        path.write_text(json.dumps({"cells": [*cells, {**step, "kernel_seconds": kernel_seconds}]}))
        assert plan().launch_us == pytest.approx(launch_us)
    path.write_text(json.dumps({"cells": cells[:1]}))
    with pytest.raises(ConfigError, match=r"no complete result of benchmarks\.gpu"):
        plan()
