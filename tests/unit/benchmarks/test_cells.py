"""Measurements of the benchmarks of the operator and of the model for each rival, in this process; programs give every
cell a process of its own."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, bmm_flop

from benchmarks import model, operator
from tost_lm.mixers.delta.chunked import delta_rule_chunks
from tost_lm.mixers.delta.settings import CHUNK_TOKENS, GROUP_CHUNKS

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


def test_the_delta_rule_is_timed_beside_all_its_matrix_products():
    tokens, heads, channels = 4 * GROUP_CHUNKS * CHUNK_TOKENS, 8, 16
    rounds = operator.beside_its_products("cpu", tokens, 1, heads, channels, "float32")
    assert {name: len(seconds) for name, seconds in rounds.items()} == {"seconds": 7, "product_seconds": 7}
    line = operator.products_line({"tokens": tokens, "seconds": [3.0], "product_seconds": [2.0]})
    assert "1.50 × the time of its matrix products alone" in line

    *inputs, initial = (
        torch.rand(*shape).requires_grad_()
        for shape in (*[(tokens, heads, channels)] * 3, *[(tokens, heads)] * 2, (1, heads, channels, channels))
    )
    in_place = {torch.ops.aten.baddbmm_: lambda _, left, right, **out: bmm_flop(left, right)}
    with FlopCounterMode(display=False, custom_mapping=in_place) as of_rule:
        y, _ = delta_rule_chunks(*inputs, initial, [tokens])  # pyright: ignore[reportCallIssue]
        y.sum().backward()
    with FlopCounterMode(display=False) as of_products:
        operator.delta_products("cpu", tokens, heads, channels)()
    solved = 2 * (tokens // CHUNK_TOKENS) * heads * (2 * CHUNK_TOKENS**2 * channels)
    assert of_products.get_total_flops() == of_rule.get_total_flops() + solved
