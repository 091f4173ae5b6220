"""A process without a launcher."""

import os

import pytest

from tost_lm.parallel.mesh import start_world, stop_world


def test_a_single_rank_leaves_no_variable_of_a_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = start_world("cpu")
    stop_world()
    assert (world.rank, world.size) == (0, 1)
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} & os.environ.keys()


def test_networks_survive_the_fork_of_loader_workers_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    for chosen in ("RDMAV_FORK_SAFE", "FI_EFA_FORK_SAFE"):
        for name in ("RDMAV_FORK_SAFE", "FI_EFA_FORK_SAFE"):
            monkeypatch.setenv(name, "0")
            if name != chosen:
                monkeypatch.delenv(name)
        start_world("cpu")
        stop_world()
        found = {name: os.environ[name] for name in ("RDMAV_FORK_SAFE", "FI_EFA_FORK_SAFE")}
        assert found == {"RDMAV_FORK_SAFE": "1", "FI_EFA_FORK_SAFE": "1"} | {chosen: "0"}
