"""The data that ranks of an executed plan read, and which of them are equal."""

from pathlib import Path
from typing import Any

import pytest
from hand_made import hand_made

from tost_lm.config import validate
from tost_lm.data.loader import Corpora
from tost_lm.errors import ConfigError, DataError
from tost_lm.pretrain import execute
from tost_lm.pretrain.execute import layout_of, mesh_of, read_all, require_executable
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.step import build_batches, tiling_of

LENGTHS = [40, 3, 17, 90, 8, 21, 64, 5, 130, 33, 12, 77]


def config_of(ranks: int = 12, seq_len: int = 64, **sections: dict[str, Any]) -> PlanConfig:
    sections = {
        "model": {"layers": 1, "heads": 2, "width": 8, "vocab_size": 1000, "max_positions": 64, "pattern": "T"},
        "data": {"folder": "none"},
        "parallel": {"tensor": 2, "sequence": 3},
        "run": {"name": "r", "device": "cpu"},
        "cluster": {"gpus_per_node": ranks},
        **sections,
    }
    train = {"steps": 9, "seq_len": seq_len, "micro_batch_size": 2, "global_batch_size": 8}
    return validate(PlanConfig, {**sections, "train": train}, "test")


def shapes(config: PlanConfig, folder: Path) -> dict[tuple[int, int], Any]:
    corpora, layout = Corpora([hand_made(folder / "shards", LENGTHS)], [1.0]), layout_of(config)
    mesh = mesh_of(layout, 0)
    return dict(read_all(config, build_batches(config, corpora, mesh, tiling_of(config, mesh)), layout))


@pytest.mark.parametrize("packing", ["concatenated", "best-fit"])
@pytest.mark.parametrize("memory", [{}, {"tile_tokens": 25}])
def test_all_ranks_together_read_each_token_once(packing: str, memory: dict[str, Any], tmp_path: Path):
    found = shapes(config_of(data={"folder": "none", "packing": packing}, memory=memory), tmp_path)
    assert list(found) == [(sequence, data) for data in range(2) for sequence in range(3)]
    of_length = {tuple((B, L) for B, L, *_ in shape) for shape in found.values()}
    assert len(of_length) > 1  # 3 does not divide 64


def test_ranks_are_equal_if_lengths_and_numbers_of_documents_are(tmp_path: Path):
    rows = shapes(config_of(seq_len=63), tmp_path)
    assert len(set(rows.values())) == 1
    packed = shapes(config_of(seq_len=63, data={"folder": "none", "packing": "best-fit"}), tmp_path)
    documents = {place: tuple(n for _, _, n, *_ in shape) for place, shape in packed.items()}
    assert len(set(documents.values())) > 1
    equal = [(a, b) for a in packed for b in packed if a < b and packed[a] == packed[b]]
    assert all(documents[a] == documents[b] for a, b in equal)


def test_columns_beside_those_of_a_rank_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = execute.batch_shard

    def wrong(config: PlanConfig, layout: Any, rank: int) -> Any:
        shard = right(config, layout, rank)
        return shard._replace(columns=((21, 42),)) if rank == 2 else shard  # not (22, 43)

    monkeypatch.setattr(execute, "batch_shard", wrong)
    with pytest.raises(DataError, match=r"16 tokens .* are not read exactly once, the first of them 2 times.* 0, 21\]"):
        shapes(config_of(ranks=6), tmp_path)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"parallel": {"zero_stage": 3}}, "parallel.zero_stage 3"),
        ({"parallel": {"zero_stage": 2, "offload": "optimizer"}}, "parallel.offload 'optimizer'"),
    ],
)
def test_what_does_not_run_on_fake_tensors_is_refused(sections: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        require_executable(config_of(**sections))
