"""The number of ranks that a launch starts, and the exit code that it derives from theirs."""

import signal
from pathlib import Path

import pytest

import tost_lm.parallel.launch as module
from tost_lm.errors import ConfigError, TostError
from tost_lm.parallel.launch import ranks_of_launch
from tost_lm.parallel.settings import LaunchConfig


@pytest.mark.parametrize(
    ("gpus", "settings", "device", "ranks"),
    [
        (0, {}, "auto", 2), (0, {"ranks": 4}, "auto", 4), (0, {"cpu_ranks": 5}, "auto", 4), (8, {}, "auto", 8),
        (8, {"ranks": 2}, "cuda", 2), (8, {"cpu_ranks": 4}, None, 8), (1, {"cpu_ranks": 4}, "cpu", 4),
    ],
)  # fmt: skip
def test_one_rank_per_gpu_or_copies_of_the_model(
    monkeypatch: pytest.MonkeyPatch, gpus: int, settings: dict[str, int], device: str | None, ranks: int
):
    monkeypatch.setattr(module, "_gpus", lambda: gpus)
    assert ranks_of_launch(2, LaunchConfig(**settings), device) == ranks
    assert gpus == 1 or ranks_of_launch(2) == 2


@pytest.mark.parametrize(
    ("model_ranks", "launch", "device", "message"),
    [
        (1, LaunchConfig(ranks=3), "auto", r"launch.ranks 3: this node has 2 GPUs; .* with run.device=cpu$"),
        (4, LaunchConfig(), "cuda", r"parallel.tensor × parallel.sequence = 4 ranks: this node has 2 GPUs; "),
        (4, None, None, r"4 ranks: this node has 2 GPUs; .* with CUDA_VISIBLE_DEVICES= before the command$"),
    ],
)
def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, model_ranks: int, launch: LaunchConfig | None, device: str | None, message: str
):
    monkeypatch.setattr(module, "_gpus", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        ranks_of_launch(model_ranks, launch, device)


def test_under_a_launcher_its_ranks_count(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_of_launch(1, LaunchConfig()) == ranks_of_launch(1, LaunchConfig(ranks=2)) == 4
    with pytest.raises(ConfigError, match=r"launch.ranks 4: the launcher has started 2 ranks on this node"):
        ranks_of_launch(1, LaunchConfig(ranks=4))
    module.start_ranks("train", 4)  # returns: this process is a rank


def test_tests_of_cpu_ranks_see_no_gpu():
    assert module._gpus() == 0


@pytest.mark.parametrize(
    ("nodes", "gpus", "binds"), [("0\n", 2, False), ("0-1\n", 2, True), ("0-1\n", 8, False), (None, 2, False)]
)
def test_ranks_of_all_gpus_are_bound_to_numa_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: str | None, gpus: int, binds: bool
):
    if nodes:
        (tmp_path / "online").write_text(nodes)
    monkeypatch.setattr(module, "NUMA_NODES", tmp_path / "online")
    monkeypatch.setattr(module, "_gpus", lambda: gpus)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module._numa_binding(2) is None
    (tmp_path / "numactl").touch(mode=0o700)
    options = module._numa_binding(2)
    assert (options.affinity_mode if options else None) == ("node" if binds else None)


@pytest.mark.parametrize(
    ("failures", "code"),
    [
        ([(0, 75), (1, 75)], 75),
        ([(1, 130), (0, 130)], 130),
        ([(1, -signal.SIGKILL), (0, 2)], 2),
        ([(1, -signal.SIGTERM), (0, 75)], 128 + signal.SIGTERM),
        ([(0, 2), (1, -signal.SIGTERM)], 2),
        ([(0, 1), (1, -signal.SIGTERM)], 1),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(failures: list[tuple[int, int]], code: int):
    assert module._exit_code(failures, forwarded={signal.SIGTERM}) == code


def test_a_killed_rank_that_no_other_reports_is_an_error_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LOST_RANK_FILE", str(tmp_path / "lost"))
    with pytest.raises(TostError, match="rank 1 was ended by SIGKILL; run the same command to resume"):
        module._exit_code([(1, -signal.SIGKILL), (0, 75)], forwarded=set())
    assert (tmp_path / "lost").exists()
