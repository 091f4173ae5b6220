"""Progress output on a terminal: one line that changes, with rate and remaining time."""

import os
import pty
import re
import subprocess
import sys
import termios

from forked import CHECKOUT, ENVIRONMENT

SCRIPT = """
import time
from tost_lm import progress
progress.TERMINAL_SECONDS = 0.2
with progress.ProgressBar("tokenizing", "B") as bar:
    for done in range(2_000_000, 8_000_001, 1_000_000):
        bar(done, 12_000_000, "5 tokens/s")
        time.sleep(0.11)
"""


def test_a_terminal_gets_one_line():
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    os.set_blocking(ours, False)
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=CHECKOUT, env=ENVIRONMENT, stderr=theirs, check=True)
    output = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert "\n" not in output
    assert re.search(r"\rtokenizing: [4-8]\.00 M of 12\.00 M B, .* M B/s, 0:00:0\d left, 5 tokens/s\x1b\[K", output)
    assert output.endswith("\r\x1b[K")
