"""The plan as a user asks for it: a table, then what does not fit in one line; nothing is written."""

import os
import re

from forked import CHECKOUT, Forked

from tost_lm.data.loader import context_shares
from tost_lm.data.shards import Shards

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


def test_shards_show_how_much_of_their_document_the_labels_see(workplace):
    lengths, row = Shards.open(workplace / "out/shards").lengths("train"), r"^\| labels that see half of seq_len +\| "
    words = ["run.toml", "cluster.gpus_per_node=1", "model.max_positions=8192"]
    code, out, err = Forked("tost plan", *words, cwd=workplace).finish()
    assert (code, err) == (0, "")
    assert re.search(rf"{row}{context_shares(lengths, 32, 'concatenated', [16])[0]:.1%} ", out, re.M)
    code, out, err = Forked(
        "tost plan", *words, "train.seq_len=8192", "train.batch_tokens=8192", cwd=workplace
    ).finish()
    assert code == 0
    assert re.search(rf"{row}0.0% .* 1,024: [0-9.]+%, 4,096: 0.0%; packing concatenated", out, re.M)
    assert err.splitlines()[-1] == (
        "warning: 0.0% of the labels see 4,096 tokens of their own document, half of train.seq_len 8192; lower "
        "train.seq_len, set data.packing=best-fit or add longer documents"
    )
    _, out, _ = Forked("tost plan", *words, "data.folder=nowhere", cwd=workplace).finish()
    assert re.search(rf"{row}unknown +\| nowhere does not exist; build it with tost prepare shards", out, re.M)


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
