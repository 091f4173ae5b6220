"""Initial draws: any slice as in the whole, a normal distribution, and a function of seed and name."""

import numpy as np
import pytest
import torch
from numpy.random import Philox

from tost_lm.model import ModelConfig, TostLM
from tost_lm.ops.initialization import BLOCK, COUNTER_WORDS, Normal, draw

STD = 0.02


@pytest.mark.parametrize(("rows", "columns"), [(7, 5), (300, 123), (9, BLOCK - 1), (3, 2 * BLOCK + 3)])
def test_rows_and_columns_are_drawn_as_in_the_whole(rows: int, columns: int):
    whole = draw(Normal(STD), 1, "a.weight", (rows, columns))
    some_rows, some_columns = [range(1, rows // 2), range(rows - 1, rows)], [range(1, 3), range(columns // 2, columns)]
    drawn = draw(Normal(STD), 1, "a.weight", (rows, columns), 0, some_rows)
    assert torch.equal(drawn, torch.cat([whole[held.start : held.stop] for held in some_rows]))
    drawn = draw(Normal(STD), 1, "a.weight", (rows, columns), 1, some_columns)
    assert torch.equal(drawn, torch.cat([whole[:, held.start : held.stop] for held in some_columns], 1))


def test_blocks_continue_one_stream():
    whole = Philox(key=3).random_raw(2 * BLOCK)
    assert np.array_equal(whole[BLOCK:], Philox(key=3, counter=BLOCK // COUNTER_WORDS).random_raw(BLOCK))


def test_draws_are_normal_and_independent_of_each_other():
    drawn = draw(Normal(STD), 0, "a.weight", (1000, 1000)).double().flatten() / STD
    ordered, count = drawn.sort().values, len(drawn)
    # Kolmogorov-Smirnov: a normal sample exceeds 1.95 / √n in 1 of 1000 cases; the seed is fixed.
    distance = (torch.special.ndtr(ordered) - (torch.arange(count) + 0.5) / count).abs().max()
    assert distance < 1.95 / count**0.5
    assert abs(float(drawn[1:] @ drawn[:-1])) < 4 * count**0.5
    for other in (draw(Normal(STD), 1, "a.weight", (1000, 1000)), draw(Normal(STD), 0, "b.weight", (1000, 1000))):
        assert abs(float(other.double().flatten() / STD @ drawn)) < 4 * count**0.5


def test_torchs_seed_decides_and_the_meta_device_draws_nothing():
    config = ModelConfig(layers=2, heads=2, width=16, vocab_size=32, pattern="TD", max_positions=8)
    torch.manual_seed(3)
    first = TostLM(config).state_dict()
    torch.manual_seed(3)
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in TostLM(config).parameters())
    second, third = TostLM(config).state_dict(), TostLM(config).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(second["embedding.weight"], third["embedding.weight"])
