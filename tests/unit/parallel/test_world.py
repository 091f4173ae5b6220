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
