"""Which tiles are possible, and which of them memory has room for."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks.engine import mesh_of_one
from tost_lm.config import load_config
from tost_lm.errors import ConfigError
from tost_lm.parallel.mesh import Axis, Mesh, World
from tost_lm.pretrain.memory_fit import memory_warning
from tost_lm.pretrain.plan.fit import complete
from tost_lm.pretrain.plan.memory import USABLE, largest_tile, peak_moment
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.tiled import tile

RECIPE = Path(__file__).parents[3] / "configs/pretrain/delta_base_1m.toml"
SHORTER = ("parallel.sequence=1", "train.seq_len=131072")


def recipe(*overrides: str) -> PretrainConfig:
    return load_config(PretrainConfig, RECIPE, [*SHORTER, *overrides])


@pytest.mark.parametrize("size", ["0", "large"])
def test_what_cannot_be_is_refused_by_name(size: str):
    with pytest.raises(ConfigError, match=r"memory\.tile_tokens"):
        recipe(f"memory.tile_tokens={size}")


def test_tiles_do_not_change_what_is_trained():
    whole, tiles = (recipe(*words).in_stages()[0] for words in ((), ("memory.tile_tokens=auto",)))
    assert whole.what_is_trained() == tiles.what_is_trained()


@pytest.mark.parametrize(("device", "share", "warned"), [("cpu", 0.9, True), ("cpu", 1.1, False), ("cuda", 0.9, False)])
def test_ranks_that_may_be_killed_are_warned_of(
    device: str, share: float, warned: bool, monkeypatch: pytest.MonkeyPatch
):
    config = recipe("memory={}", "run.device=cpu")
    needed = peak_moment(config, 2).total
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(2 * share * needed)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(share * needed), 0))
    warning = memory_warning(config, World(0, 2, torch.device(device), timedelta(1)))
    assert warning.startswith(f"warning: each rank needs {needed / 1e9:.1f} GB of memory") == warned


def mesh_of(ranks: int, rank: int = 0) -> Mesh:
    return mesh_of_one(torch.device("cpu"))._replace(sequence=Axis(rank, ranks, None))


def test_the_sequence_shards_of_all_ranks_are_the_row():
    columns = [pair for rank in range(3) for pair in (t.columns for t in tile(mesh_of(3, rank), 23, 10).tiles)]
    assert sorted(token for start, end in columns for token in range(start, end)) == list(range(23))
    assert [t.split.tokens for t in tile(mesh_of(3), 23, 10).tiles] == [10, 10, 3]


def test_a_tile_with_less_than_a_token_for_each_rank_is_refused():
    with pytest.raises(ConfigError, match="the tile at 20 of 23 tokens has 3 tokens"):
        tile(mesh_of(4), 23, 10)


def test_the_largest_tile_that_fits_is_a_power_of_two_or_the_row():
    planned = lambda size: peak_moment(recipe(f"memory.tile_tokens={size}"), 8).total / USABLE
    whole = planned(131072)
    assert largest_tile(recipe(), 8, whole).tile_tokens == 131072
    sizes = [largest_tile(recipe(), 8, whole * share).tile_tokens for share in (0.99, 0.5, 0.25)]
    assert sizes == sorted(sizes, reverse=True)
    for size, share in zip(sizes, (0.99, 0.5, 0.25), strict=True):
        assert size & (size - 1) == 0
        assert peak_moment(recipe(f"memory.tile_tokens={size}"), 8).total <= USABLE * whole * share
        assert (
            peak_moment(recipe(f"memory.tile_tokens={2 * size}"), 8).total > USABLE * whole * share
            or 2 * size == 131072
        )
    with pytest.raises(ConfigError, match="the plan of tiles of 1024 tokens needs"):
        largest_tile(recipe(), 8, 1e9)


def test_the_plan_leaves_as_much_memory_as_a_run():
    config = load_config(PlanConfig, RECIPE, [*SHORTER, "memory.tile_tokens=auto", "cluster.memory_gb=20"])
    assert complete(config).tile_tokens == largest_tile(config, 8, 20e9).tile_tokens < 131072


def test_no_tile_fits_and_the_error_names_what_does():
    words = [*SHORTER, "memory.tile_tokens=auto", "cluster.memory_gb=1.4"]
    with pytest.raises(ConfigError, match=r"and 1\.1 GB are usable; set parallel\.sequence=2 parallel\.zero_stage=3$"):
        complete(load_config(PlanConfig, RECIPE, words))
    complete(load_config(PlanConfig, RECIPE, [*words, "parallel.sequence=2", "parallel.zero_stage=3"]))
