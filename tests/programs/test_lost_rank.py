"""A rank is killed under torchrun while the others wait for it in a collective: one line names it, and the run ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import ENVIRONMENT

RANKS = 3
PROGRAM = '''
"""All ranks meet; then rank 0, 1 or 2, as LATE says, comes to the second meeting a minute late."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tost_lm.config import run_program
from tost_lm.config.section import Section
from tost_lm.parallel.failures import naming_lost_ranks
from tost_lm.parallel.world import start_world, stop_world


class Nothing(Section):
    """No settings."""


def main(path: None, config: Nothing) -> None:
    world = start_world("cpu")
    with naming_lost_ranks():
        dist.all_reduce(torch.ones(3))
        Path(f"{world.rank}.pid").write_text(str(os.getpid()))
        if world.rank == int(os.environ["LATE"]):
            time.sleep(60)
        dist.all_reduce(torch.ones(3))
        stop_world()


run_program(main, name="program", doc=__doc__, takes="[CONFIG]", config=Nothing)
'''


@pytest.mark.parametrize("lost", [0, 2])
def test_a_killed_rank_ends_the_run_with_one_line_that_names_it(lost: int, tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    with subprocess.Popen(
        [*launcher, "program.py"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "LATE": str(lost)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while len(list(tmp_path.glob("*.pid"))) < RANKS and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.5)  # the others are in the collective by then
            pid = int((tmp_path / f"{lost}.pid").read_text())
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert time.monotonic() - killed < 20
    assert process.returncode != 0
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line == f"error: rank {lost} ({os.uname().nodename}, pid {pid}) was lost: its process is gone"
    assert not re.search(r"^\[rank|^frame #|terminate called", said, re.MULTILINE), said
