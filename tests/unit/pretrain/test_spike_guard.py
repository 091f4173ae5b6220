"""Which steps are skipped, and when that ends the run."""

import math

import pytest

from tost_lm.checkpointing.format import Progress
from tost_lm.errors import TrainingError
from tost_lm.pretrain.spikes import WINDOW, SpikeGuard

pytestmark = pytest.mark.quick

STEADY = tuple((3.0 + 0.01 * (i % 5), 1.0 + 0.1 * (i % 3)) for i in range(WINDOW))


def guard(
    sigmas: float | None = 6.0, recent: tuple[tuple[float, float], ...] = STEADY, abort_after: int = 3
) -> SpikeGuard:
    return SpikeGuard(sigmas, abort_after, Progress(WINDOW, WINDOW, recent=recent))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_always_skipped(bad: float):
    for sigmas in (None, 6.0):
        assert guard(sigmas).reason_to_skip(bad, 1.0) == f"loss is {bad}"
        assert guard(sigmas).reason_to_skip(3.0, bad) == f"gradient norm is {bad}"


def test_a_spike_of_either_is_skipped_only_if_asked_for_and_after_half_a_window():
    assert guard().reason_to_skip(3.05, 1.3) == ""
    assert guard().reason_to_skip(2.0, 0.1) == ""  # far below is no spike
    assert guard().reason_to_skip(3.5, 1.1).startswith("loss 3.5 is 34.")
    assert guard().reason_to_skip(3.02, 9.0).endswith("standard deviations above 1.099")
    assert guard(None).reason_to_skip(1e9, 1e9) == ""
    assert guard(recent=STEADY[: WINDOW // 2 - 1]).reason_to_skip(1e9, 1e9) == ""
    assert guard(recent=STEADY[: WINDOW // 2]).reason_to_skip(1e9, 1e9) != ""


def test_steps_are_judged_by_the_newest_applied_ones():
    judge = guard()
    for i in range(WINDOW):
        judge.record(5.0 + 0.01 * (i % 5), 1.0, "", i)
    assert judge.reason_to_skip(5.05, 1.0) == ""
    before = judge.recent
    judge.record(99.0, 1.0, "loss 99", 1)
    assert judge.recent == before
    assert len(before) == WINDOW


def test_without_a_limit_nothing_is_remembered():
    judge = guard(None, recent=())
    judge.record(1.0, 1.0, "", 1)
    assert judge.recent == ()


def test_too_many_in_a_row_end_the_run_and_an_applied_one_begins_the_count_anew():
    judge = guard(None, recent=())
    for reason_to_skip in ("inf", "inf", "", "inf", "inf"):
        judge.record(math.inf, 1.0, reason_to_skip, 7)
    assert judge.in_a_row == 2
    with pytest.raises(TrainingError, match=r"step 8: loss is inf; 3 steps in a row were skipped"):
        judge.record(math.inf, 1.0, "loss is inf", 8)


def test_the_count_goes_on_over_a_restart():
    judge = SpikeGuard(None, 3, Progress(5, 3, skipped_in_a_row=2))
    with pytest.raises(TrainingError):
        judge.record(math.inf, 1.0, "loss is inf", 6)
