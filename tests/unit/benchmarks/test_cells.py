"""Measurements of the benchmarks of the operator and of the model for each rival, in this process; programs give every
cell a process of its own."""

from functools import partial

import pytest

from benchmarks import model, operator

TOKENS = 64


@pytest.mark.parametrize("work", [operator.FORWARD, operator.BOTH])
def test_every_rival_of_the_operator_is_measured(work: str):
    shape = {"batch": 1, "heads": 2, "channels": 8, "dtype": "float32", "work": work, "tokens": TOKENS}
    rivals = [rival for rival in operator.RIVALS if rival != operator.COMPILED]  # tests/full compiles
    cells = [
        {"work": work, "tokens": TOKENS, "rival": rival, **operator.one_call("cpu", rival, **shape)} for rival in rivals
    ]
    raced = operator.time_in_turns("cpu", {name: name for name in rivals}, budget_s=10, **shape)
    assert all(cell["w_bytes"] == TOKENS * 16 * 4 and len(cell["seconds"]) == 1 for cell in cells)
    assert list(raced) == rivals
    assert all(len(seconds) == 7 and min(seconds) > 0 for seconds in raced.values())
    (row,) = operator.table_rows(cells, partial(operator.described, 1e9))
    assert "× time" in row["naive ÷ ours"]


@pytest.mark.parametrize("work", [model.TRAINING, model.DECODING])
def test_every_rival_of_the_model_is_measured(work: str):
    shape = {"layers": 1, "width": 8, "heads": 2, "vocab_size": 256}
    rivals = {
        name: {"settings": {**model.COMMON, **settings, **shape}, "attention": model.ATTENTION.get(name)}
        for name, settings in model.RIVALS.items()
    }
    call = {"work": work, "tokens": TOKENS, "dtype": "float32"}
    cells = [
        {"work": work, "tokens": TOKENS, "rival": name, **model.one_call("cpu", rival=rival, **call)}
        for name, rival in rivals.items()
    ]
    raced = model.time_in_turns("cpu", rivals=rivals, budget_s=10, **call)
    assert list(raced) == list(rivals)
    assert all(len(seconds) == 7 and min(seconds) > 0 for seconds in raced.values())
    tost, *gpt2 = (cell["state_bytes"] for cell in cells)
    assert tost < 4 * TOKENS
    assert gpt2 == ([0, 0] if work == model.TRAINING else [TOKENS * 2 * 8 * 4] * 2)
    assert len(model.table_rows(cells)) == 1
