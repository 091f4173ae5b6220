"""Commands of `tost` in a process of their own, as a reader would type them, in the checkout."""

import subprocess
import sys
from pathlib import Path

from tost_lm.errors import TostError

ROOT = Path(__file__).parents[1]


def run_tost(*words: str) -> None:
    """Print and run a command. Raises TostError if it fails."""
    print("tost", *words, flush=True)
    module = [sys.executable, "-m", "tost_lm.cli.main", *words]
    if code := subprocess.run(module, cwd=ROOT, check=False).returncode:
        raise TostError(f"tost {' '.join(words)}: exit code {code}")
