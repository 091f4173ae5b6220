"""Commands of the package, as a user types them."""

import subprocess
import sys
from pathlib import Path

from tost_lm.errors import TostError

ROOT = Path(__file__).parents[1]
"""The checkout, in which they run."""


def call(command: list[str]) -> None:
    """Run a command `tost …`. Raises TostError: it failed."""
    print(" ".join(command), flush=True)
    module = [sys.executable, "-m", "tost_lm.cli.main", *command[1:]]
    if code := subprocess.run(module, cwd=ROOT, check=False).returncode:
        raise TostError(f"{' '.join(command)}: exit code {code}")
