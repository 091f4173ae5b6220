"""Messages and memory of an executed plan, beside ranks that really train: 2 and 8 of them."""

from typing import Any

import pytest
from executing import executed
from memory_of_training import settings_of, train_measured
from test_plan_on_ranks import by_kind

from tost_lm.config import validate
from tost_lm.pretrain.plan.memory import peak_moment
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.testing import run_on_ranks


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        (2, {"data_ranks": 2}),
        (2, {"micro_batch": 8, "vocab_size": 512, "pattern": "TA", "parallel": {"sequence": 2}}),
        (2, {"micro_batch": 8, "parallel": {"tensor": 2}}),
        (8, {"layers": 2, "micro_batch": 2, "pattern": "SA", "tokens": 512, "data_ranks": 2,
             "parallel": {"tensor": 2, "sequence": 2, "zero_stage": 2}}),
    ],
)  # fmt: skip
def test_messages_equal_and_memory_within_a_twentieth(ranks: int, shape: dict[str, Any]):
    settings = settings_of(**shape)
    config = validate(PlanConfig, {**settings, "cluster": {"gpus_per_node": ranks}}, "test")
    # A CPU has only the memory of buckets that is written, and the plan a bound of it.
    not_written = peak_moment(config, ranks, whole_buckets=True).total - peak_moment(config, ranks).total
    on_ranks = run_on_ranks(train_measured, ranks, settings, timeout_s=600)
    for measured, by_execution in zip(on_ranks, executed(settings, ranks, range(ranks)), strict=True):
        assert by_execution.sent == by_kind(measured)
        whole = sum(by_execution.peak.values())
        assert 0.95 * (whole - not_written) <= measured.peak_bytes <= 1.05 * whole
