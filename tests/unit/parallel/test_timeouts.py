"""No later stage of a failure fires before an earlier one, whatever `run.timeout_seconds` is."""

import pytest

from tost_lm import parallel
from tost_lm.config import ALONE_S
from tost_lm.parallel import Timeouts


@pytest.mark.parametrize("seconds", [0.1, 1.0, 5.0, 60.0, 600.0, 86400.0])
def test_stages_of_a_hang_follow_each_other(seconds: float):
    limits = Timeouts(seconds)
    noticed = limits.of_phase("training") + parallel.CHECK_S
    ended = parallel.READ_S + parallel.EXIT_S
    named = limits.heartbeat + parallel.ANSWER_S + parallel.POLL_S
    named_by_another_rank = limits.heartbeat + 2 * parallel.ANSWER_S + parallel.POLL_S
    store_lost = limits.heartbeat + parallel.STORE_S
    stages = [limits.heartbeat, noticed, named, named_by_another_rank, store_lost, store_lost + ended + parallel.DUMP_S]
    assert stages == sorted(set(stages))
    assert named + ended < limits.heartbeat + 2  # guaranteed
    assert stages[-1] < limits.collective  # of NCCL and gloo, which end a process without a line


@pytest.mark.parametrize("seconds", [0.1, 1.0, 5.0, 60.0, 600.0, 86400.0])
def test_whoever_is_waited_for_times_out_first(seconds: float):
    limits = Timeouts(seconds)
    assert limits.close < limits.heartbeat < limits.save  # a logger, a shard, the checkpoint
    assert limits.close <= parallel.CLOSE_S
    assert limits.heartbeat <= limits.start == limits.of_phase("building")


def test_constants_are_in_order():
    assert parallel.POLL_S < parallel.READ_S  # ranks that wait for the line read it before a process ends
    assert parallel.CHECK_S + parallel.POLL_S < parallel.ANSWER_S  # ranks that do not wait answer in time
    assert parallel.STORE_S < parallel.SUSPENDED_S  # a store that does not respond is no suspension
    assert parallel.DUMP_S < parallel.GIL_S
    assert parallel.EXIT_S < ALONE_S < parallel.FAILED_EXIT_S  # a rank that failed prints its error before others end
