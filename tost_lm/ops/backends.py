"""The choice between the forms of an operation: kernels for some devices and dtypes, and PyTorch.

An operation lists its backends, the preferred one first. A new one is a module with its code, and a line in the list.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost_lm.errors import install_hint


class Backend(NamedTuple):
    name: str
    obstacle: Callable[..., str | None]
    """From the arguments of a call to the reason why the backend cannot run it; None: it can."""
    code: Any
    """What runs it, in a form that is the same for all backends of the operation."""


def choose(backends: Sequence[Backend], *call: Any, name: str | None = None) -> Any:
    """The code of the first backend that can run the call, or of the named one.

    Raises:
        ValueError: no backend has the name, or it cannot run the call.
    """
    for backend in backends:
        if name in (None, backend.name):
            obstacle = backend.obstacle(*call)
            if obstacle is None:
                return backend.code
            if name is not None:
                raise ValueError(f"backend {name!r} cannot run here: {obstacle}; use None for the default")
    names = ", ".join(backend.name for backend in backends)
    raise ValueError(f"unknown backend: {name!r}; use one of {names}, or None for the default")


def no_obstacle(*call: Any) -> None:
    """That of a backend that runs every call."""


def obstacle_to_kernels(x: Tensor, package: str) -> str | None:
    """That of kernels for CUDA devices with float32 statistics, from an optional package."""
    if not x.is_cuda:
        return f"the input is on {x.device}, but its kernels run on CUDA devices"
    if x.dtype == torch.float64:
        return "its statistics are float32, too few digits for float64 inputs"
    return not_installed(package)


def not_installed(package: str) -> str | None:
    """That of the kernels of a package that is missing; `fla` is the package fla-core."""
    if find_spec(package):
        return None
    name, fix = ("fla-core", install_hint("gpu")) if package == "fla" else (package, f"install {package}")
    return f"the package {name} is not installed; {fix}"
