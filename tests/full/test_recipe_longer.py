"""The recipe `longer`, whole, as its tutorial walks through it: needles of its longest stage before and after."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from programs import curve, run

NEEDLE = ["heldout.shards=data/embedded/shards", "needle.lengths=[8192]"]


def needle(place: Path) -> tuple[float, float]:
    """The share of right choices at 8,192 tokens by the newest checkpoint, with the needle and without it."""
    run("tost eval", "runs/longer", "needle", *NEEDLE, cwd=place)
    cells = json.loads((place / "runs/longer/eval/needle@keys/results.json").read_text())["cells"]
    return fmean(cell["choice_accuracy"] for cell in cells), fmean(cell["control_choice_accuracy"] for cell in cells)


@pytest.mark.timeout(1200)
def test_a_run_learns_to_retrieve_at_the_length_of_its_last_stage(tmp_path: Path):
    for kind, recipe in [
        ("tokenizer", "embedded"),
        ("shards", "embedded"),
        ("passages", "passages"),
        ("shards", "passages"),
    ]:
        run(f"tost prepare {kind}", recipe, cwd=tmp_path)
    run("tost train", "longer", "launch.ranks=2", "run.stop_at_step=450", cwd=tmp_path)
    before, _ = needle(tmp_path)
    run("tost train", "longer", "launch.ranks=2", cwd=tmp_path)
    after, control = needle(tmp_path)
    assert curve(tmp_path, "longer")[-1][0] == 525
    assert after > before
    assert after > control + 0.2
