"""The choice of a backend of causal TSSA."""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from tost_lm.mixers.tssa import chunked
from tost_lm.mixers.tssa.phases import Phases

BACKENDS = ("chunked", "triton")


def choose(name: str | None, w_BTHD: Tensor) -> Phases:
    """The phases of a backend; None: of the default for w. Raises ValueError if it is unknown or cannot run."""
    if name not in (None, *BACKENDS):
        raise ValueError(f"unknown backend: {name!r}; use one of {', '.join(BACKENDS)}, or None for the default")
    obstacle = obstacle_to_triton(w_BTHD)
    if name == "triton" and obstacle:
        raise ValueError(f"backend {name!r} cannot run here: {obstacle}; use None for the default")
    if name == "chunked" or obstacle or (name is None and not w_BTHD.is_cuda):
        return chunked
    from tost_lm.mixers.tssa import triton  # an optional package, and slow to import

    return triton


def obstacle_to_triton(w_BTHD: Tensor) -> str | None:
    """The reason why the Triton kernels cannot read w, or None."""
    if not find_spec("triton"):
        return "the package triton is not installed"
    if not w_BTHD.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"w is on {w_BTHD.device}, but its kernels run on CUDA devices"
    if w_BTHD.dtype == torch.float64:
        return "its statistics are float32, too few digits for float64 inputs"
    _, _, H, D = w_BTHD.shape
    if H > 64 or D > 256:
        return f"w has {H} heads of {D} channels, but its kernels support up to 64 of 256"
    return None
