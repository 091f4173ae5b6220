"""A process without a launcher."""

import os

import pytest
import torch

from tost_lm.errors import ConfigError
from tost_lm.parallel.mesh import start_world, stop_world


def test_a_single_rank_leaves_no_variable_of_a_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = start_world("cpu")
    stop_world()
    assert (world.rank, world.size) == (0, 1)
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} & os.environ.keys()


@pytest.mark.parametrize(
    ("given", "used"),
    [({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
     ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None)],
)  # fmt: skip
def test_ranks_on_gpus_let_segments_grow_unless_the_user_chooses(
    given: dict[str, str], used: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "environ", {**given})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="no GPU for local rank 0"):
        start_world("cuda")
    assert os.environ.get("PYTORCH_ALLOC_CONF") == used
