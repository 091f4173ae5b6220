"""A network cut between two hosts under torchrun: one line on each side names what was lost, and the run ends."""

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import ENVIRONMENT, wait_until
from two_hosts import INTERFACE, two_hosts

from tost_lm.parallel.watchdog import read_heartbeats

HOST = os.uname().nodename
TIMEOUT_S = 5
BUSY_MACHINE_S = 15  # added to the guaranteed 2 s
PROGRAM = f'''
"""Steps with a collective."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from tost_lm.command_line import run_program
from tost_lm.config import Section
from tost_lm.parallel.timeouts import Timeouts
from tost_lm.parallel.watchdog import watch_ranks
from tost_lm.parallel.watchdog import Heartbeat
from tost_lm.parallel.mesh import start_world, stop_world


class NoSettings(Section):
    """No settings."""


def main(path: None, config: NoSettings) -> None:
    world = start_world("cpu", Timeouts({TIMEOUT_S}))
    heartbeat = Heartbeat(Path("heartbeats"), world.rank)
    with watch_ranks(heartbeat, Timeouts({TIMEOUT_S})):
        for step in range(1, 1000):
            heartbeat.record(step, "training")
            time.sleep(0.1)
            dist.all_reduce(torch.ones(3))
        stop_world()


run_program(main, name="program", doc=__doc__, positional="[CONFIG]", config=NoSettings)
'''


@pytest.mark.slow
def test_after_a_network_cut_both_sides_end_and_name_what_they_lost(
    tmp_path: Path, request: pytest.FixtureRequest, record_fault: Callable[[str, int, str], None]
):
    cuts = 5 if request.config.getoption("--full") else 1
    for number in range(cuts):
        (tmp_path / str(number)).mkdir()
        cut_the_network(tmp_path / str(number))
    record_fault(
        "network cut between two network namespaces",
        cuts,
        "both sides end with an error that names the lost rank or launcher",
    )


def cut_the_network(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    logs = [folder / "host0", folder / "host1"]
    with two_hosts() as hosts:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += [f"--master-addr={hosts[0].address}", "program.py"]
        environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": INTERFACE}
        launchers = [
            host.start([*command[:-1], f"--node-rank={node}", command[-1]], log, cwd=folder, environment=environment)
            for node, (host, log) in enumerate(zip(hosts, logs, strict=True))
        ]
        beats = lambda: read_heartbeats(folder / "heartbeats")
        wait_until(lambda: len(beats()) == 2 and min(beat.step for beat in beats().values()) > 3, *launchers)
        hosts[0].cut_off()
        cut = time.monotonic()
        for launcher in launchers:
            launcher.wait(timeout=60)
        took = time.monotonic() - cut
    errors = [re.findall("^error: (.*)$", log.read_text(), re.MULTILINE) for log in logs]
    lost = rf"rank 1 \({HOST}, pid \d+\) was lost: it does not answer; its last step was \d+ \(training, \d+ s ago\)"
    assert len(errors[0]) == 1, logs[0].read_text()
    assert re.fullmatch(lost, errors[0][0])
    launcher_lost = f"the launcher on {hosts[0].address} was lost: it held the rendezvous store"
    assert errors[1] == [launcher_lost], logs[1].read_text()
    assert all(launcher.returncode for launcher in launchers)
    assert TIMEOUT_S - 1 < took < TIMEOUT_S + 5 + BUSY_MACHINE_S
