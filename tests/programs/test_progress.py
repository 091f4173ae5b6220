"""Progress output: periodic lines in a log, a bar on a terminal, rate and remaining time in both."""

import os
import pty
import subprocess
import sys
import termios

from forked import CHECKOUT, ENVIRONMENT

SCRIPT = """
import time
from tost_lm import progress
progress.LINE_SECONDS = 0.2
with progress.Progress("tokenizing", "B") as bar:
    for done in range(2_000_000, 8_000_001, 1_000_000):
        bar(done, 12_000_000, "5 tokens/s")
        time.sleep(0.11)
"""


def test_a_terminal_gets_a_bar():
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    os.set_blocking(ours, False)
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=CHECKOUT, env=ENVIRONMENT, stderr=theirs, check=True)
    output = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert "tokenizing: " in output
    assert "/12.0M" in output
    assert "MB/s" in output
    assert "5 tokens/s" in output
