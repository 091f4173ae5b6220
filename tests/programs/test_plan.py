"""The plan as a user asks for it: a table, then what does not fit in one line; nothing is written."""

import os
import re

from forked import CHECKOUT, Forked

RECIPE = CHECKOUT / "configs/pretrain/owt_tost_base.toml"


def test_a_plan_that_does_not_fit_shows_its_table_and_what_does(tmp_path):
    code, out, err = Forked(
        "tost plan", RECIPE, "train.micro_batch_size=60", "cluster.memory_gb=20", cwd=tmp_path
    ).finish()
    assert code == 2
    assert "| GPU memory " in out
    assert "| duration of the run " in out
    assert err.startswith("error: a GPU needs ")
    assert "; set train.micro_batch_size=30 (" in err
    assert len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_an_executed_plan_shows_what_ran_and_the_collectives_of_each_class(workplace):
    before = sorted(os.listdir(workplace))
    code, out, err = Forked(
        "tost plan", "run.toml", "plan.execute=true", "cluster.gpus_per_node=4", "parallel.sequence=2",
        cwd=workplace,
    ).finish()  # fmt: skip
    assert code == 0, err
    assert "4 ranks in 1 class " in out
    assert "all of ZeRO stage 1" in out
    assert "stand-ins" in out
    assert len(re.findall(r"^\| bytes: .*as planned; groups of", out, re.M)) == 3
    assert re.search(r"^\| class 1: collectives in order +\| group", out, re.M)
    assert sorted(os.listdir(workplace)) == before


def test_an_execution_without_shards_or_at_stage_3_ends_with_one_line(workplace):
    for words, named in ((["data.folder=nowhere"], "nowhere"), (["parallel.zero_stage=3"], "parallel.zero_stage 3")):
        code, _, err = Forked(
            "tost plan", "run.toml", "plan.execute=true", "cluster.gpus_per_node=4", *words, cwd=workplace
        ).finish()
        assert code == 2
        assert named in err
        assert len(err.splitlines()) == 1
