"""No later stage of a failure fires before an earlier one, whatever `run.timeout_seconds` is."""

import pytest

from tost_lm.parallel import timeouts
from tost_lm.parallel.timeouts import Timeouts


@pytest.mark.parametrize("seconds", [0.1, 1.0, 5.0, 60.0, 600.0, 86400.0])
def test_stages_of_a_hang_follow_each_other(seconds: float):
    limits = Timeouts(seconds)
    noticed = limits.of_phase("training") + timeouts.CHECK_S
    ended = timeouts.READ_S + timeouts.EXIT_S
    named = limits.heartbeat + timeouts.ANSWER_S + timeouts.POLL_S
    named_by_another_rank = limits.heartbeat + 2 * timeouts.ANSWER_S + timeouts.POLL_S
    store_lost = limits.heartbeat + timeouts.STORE_S
    stages = [limits.heartbeat, noticed, named, named_by_another_rank, store_lost, store_lost + ended + timeouts.DUMP_S]
    assert stages == sorted(set(stages))
    assert named + ended < limits.heartbeat + 2  # guaranteed
    assert stages[-1] < limits.collective  # of NCCL and gloo, which end a process without a line


@pytest.mark.parametrize("seconds", [0.1, 1.0, 5.0, 60.0, 600.0, 86400.0])
def test_whoever_is_waited_for_times_out_first(seconds: float):
    limits = Timeouts(seconds)
    assert limits.close < limits.heartbeat < limits.save  # a logger, a shard, the checkpoint
    assert limits.close <= timeouts.CLOSE_S
    assert limits.heartbeat <= limits.start == limits.of_phase("building")
