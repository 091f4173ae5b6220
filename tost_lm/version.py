"""The version of tost_lm, recorded in what it writes."""

import subprocess
from pathlib import Path

VERSION = "0.1.0"


def git_commit() -> str | None:
    """Of the checkout that this package lies in, `-dirty` behind it where files were changed; None outside of one."""
    checkout = Path(__file__).parents[1]
    if not (checkout / ".git").exists():
        return None
    asked = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
