"""The version of tost_lm, recorded in its output files, and what identifies its code."""

import hashlib
import subprocess
from pathlib import Path

VERSION = "0.2.0"


def code_sha256() -> str:
    """Hex SHA-256 of the package's Python files, equal for a checkout and a wheel of it."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\n{len(data)}\n".encode() + data)
    return digest.hexdigest()


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
