"""The version of tost_lm, recorded in its output files."""

import subprocess
from pathlib import Path

VERSION = "0.1.0"


def git_commit() -> str | None:
    """The commit of the checkout that contains this package, with `-dirty` if files have changed; None: no checkout."""
    checkout = Path(__file__).parents[1]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
