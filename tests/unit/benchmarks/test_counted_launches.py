"""The operations that `benchmarks.launches` counts are those that the plan takes, whatever the documents."""

import pytest

from benchmarks.launches_cells import count
from tost_lm.mixers.facts import BLOCK_LAUNCHES
from tost_lm.mixers.registry import FACTS


@pytest.mark.parametrize("letter", "TSDA")
def test_a_layer_launches_what_the_plan_takes(letter: str):
    if letter == "D":
        pytest.importorskip("fla")
    few, many = (count(letter, 4, 64, documents) for documents in (4, 40))
    together = few["forward"] + few["backward"]
    assert together == many["forward"] + many["backward"]
    assert together + BLOCK_LAUNCHES == FACTS[letter].launches()


def test_a_block_around_its_mixer():
    model, layer = count("tost-base", 4, 64, 4), count("T", 4, 64, 4)
    around = sum(model[key] - 12 * layer[key] for key in ("forward", "backward"))
    assert around / 12 == pytest.approx(BLOCK_LAUNCHES, abs=1)
