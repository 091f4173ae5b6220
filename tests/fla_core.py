"""fla-core where only tests find it: transformers would call its kernels on CPUs too, where they fail."""

import sys
from pathlib import Path
from typing import Any

import pytest


def fla_core(module: str = "fla") -> Any:
    """A module of fla-core; without the package, the test is skipped."""
    if (folder := str(Path(sys.prefix, "fla"))) not in sys.path:
        sys.path.append(folder)
    return pytest.importorskip(module)
