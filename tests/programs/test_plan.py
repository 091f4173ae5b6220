"""The plan as a user asks for it: a table, then what does not fit in one line; nothing is written."""

import os

from forked import CHECKOUT, Forked

RECIPE = CHECKOUT / "configs/pretrain/owt_tost_base.toml"


def test_a_plan_that_does_not_fit_shows_its_table_and_what_does(tmp_path):
    code, out, err = Forked(
        "pretrain.plan", RECIPE, "train.micro_batch_size=60", "cluster.memory_gb=20", cwd=tmp_path
    ).finish()
    assert code == 2
    assert "| GPU memory " in out
    assert "| duration of the run " in out
    assert err.startswith("error: a GPU needs ")
    assert "; set train.micro_batch_size=30 (" in err
    assert len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == []
