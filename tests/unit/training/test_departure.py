"""When a rank wants to leave, and with which exit code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tost_lm.config.program import EXIT_LEFT
from tost_lm.training.departure import REASONS, Departure


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_a_wish_while_under_way_and_the_end_before(signum: signal.Signals):
    departure = Departure()
    departure.listen()
    with pytest.raises(SystemExit) as left:
        os.kill(os.getpid(), signum)
    assert left.value.code == EXIT_LEFT
    departure.get_under_way()
    assert departure.wish(1e9) == 0
    os.kill(os.getpid(), signum)
    assert REASONS[departure.wish(0)] == signum.name


def test_the_limit_counts_from_the_launch_and_leaves_time_for_what_is_left_to_do():
    age = time.time() - psutil.Process().create_time()
    departure = Departure(max_minutes=(age + 100) / 60)
    assert departure.wish(seconds_needed=50) == 0
    assert REASONS[departure.wish(seconds_needed=101)] == "run.max_minutes"


def test_under_torchrun_the_launch_is_torchruns_own():
    code = "import time; time.sleep(1.5); import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = (
        "import os, psutil, tost_lm.training.departure as d; print(d._launched(), psutil.Process().create_time());"
        "os.environ['TORCHELASTIC_RUN_ID'] = 'x'; print(d._launched(), psutil.Process(os.getppid()).create_time())"
    )
    done = subprocess.run([sys.executable, "-c", code, child], capture_output=True, text=True, check=True)
    (own, started), (launch, launcher) = ([float(x) for x in line.split()] for line in done.stdout.splitlines())
    assert own == started
    assert launch == launcher < own - 1
