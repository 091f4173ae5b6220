"""When a rank has to stop, and with which exit code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tost_lm.command_line import EXIT_STOPPED
from tost_lm.parallel import graceful_stop as module
from tost_lm.parallel.graceful_stop import GracefulStop, launched_ago


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_process_before_training_and_requests_a_stop_during_it(signum: signal.Signals):
    graceful_stop = GracefulStop()
    graceful_stop.install_handlers()
    with pytest.raises(SystemExit) as exited:
        os.kill(os.getpid(), signum)
    assert exited.value.code == EXIT_STOPPED
    assert graceful_stop.start_training(lambda: "") == ""
    assert graceful_stop.requested(1e9) == ""
    os.kill(os.getpid(), signum)
    assert graceful_stop.requested(0) == signum.name


def test_a_rank_with_a_request_ends_gracefully_when_another_ended_before_training():
    graceful_stop = GracefulStop()

    def compare(with_request: bool) -> str:
        if with_request:
            graceful_stop.request()
        raise ConnectionError("the other rank ended")

    with pytest.raises(ConnectionError):
        graceful_stop.start_training(lambda: compare(with_request=False))
    with pytest.raises(SystemExit) as exited:
        graceful_stop.start_training(lambda: compare(with_request=True))
    assert exited.value.code == EXIT_STOPPED


def test_a_first_interrupt_requests_a_stop_and_a_second_ends_the_process(monkeypatch: pytest.MonkeyPatch):
    graceful_stop = GracefulStop()
    graceful_stop.install_handlers()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)  # nothing to save yet
    graceful_stop.start_training(lambda: "")
    for _ in range(2):  # the terminal's, and the one that torchrun repeats
        os.kill(os.getpid(), signal.SIGINT)
        assert graceful_stop.requested(0) == "SIGINT"
    monkeypatch.setattr(module, "SAME_INTERRUPT_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_the_limit_counts_from_the_launch_and_leaves_time_to_save(monkeypatch: pytest.MonkeyPatch):
    graceful_stop = GracefulStop(max_minutes=(launched_ago() + 100) / 60)
    real = time.time
    for jump in (0, 86400, -86400):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        assert graceful_stop.requested(seconds_needed=10) == ""
        assert graceful_stop.requested(seconds_needed=101) == "run.max_minutes"


def test_under_torchrun_the_launch_is_torchruns_own():
    code = "import time; time.sleep(1.5); import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = (
        "import os; from tost_lm.parallel.graceful_stop import launched_ago; own = launched_ago();"
        "os.environ['TORCHELASTIC_RUN_ID'] = 'x'; print(own, launched_ago())"
    )
    done = subprocess.run([sys.executable, "-c", code, child], capture_output=True, text=True, check=True)
    own, launch = map(float, done.stdout.split())
    assert launch > own + 1
