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
    obstacle: Callable[..., str | None] | None
    """From the arguments of a call to the reason why it cannot run this call, or None. No function: it runs all."""
    code: Any
    """What runs it, in a form that is the same for all backends of the operation."""


def choose(backends: Sequence[Backend], *call: Any, name: str | None = None) -> Any:
    """The code of the first backend that can run the call, or of the named one.

    Raises:
        ValueError: no backend has the name, or it cannot run the call.
    """
    for backend in backends:
        if name in (None, backend.name):
            obstacle = backend.obstacle and backend.obstacle(*call)
            if not obstacle:
                return backend.code
            if name:
                raise ValueError(f"backend {name!r} cannot run here: {obstacle}; use None for the default")
    names = ", ".join(backend.name for backend in backends)
    raise ValueError(f"unknown backend: {name!r}; use one of {names}, or None for the default")


HALF_PRECISION = (torch.bfloat16, torch.float16)
LOW_PRECISION = (*HALF_PRECISION, torch.float32)
"""Dtypes for which statistics in float32 have enough digits."""


def obstacle_to_kernels(x: Tensor, dtypes: Sequence[torch.dtype], package: str | None = None) -> str | None:
    """The obstacle to kernels of torch or of a package, for inputs of these dtypes on CUDA devices."""
    if not x.is_cuda:
        return f"the input is on {x.device}, but its kernels run on CUDA devices"
    if x.dtype not in dtypes:
        return f"the input is {x.dtype}, but its kernels support {', '.join(map(str, dtypes))}"
    return package and not_installed(package)


def not_installed(package: str) -> str | None:
    if find_spec(package.removesuffix("-core")):  # fla-core has the module fla
        return None
    fix = install_hint("gpu") if package == "fla-core" else f"install {package}"
    return f"the package {package} is not installed; {fix}"
