"""Dtypes of statistics, and floors of divisions."""

import torch
from torch import Tensor

MASS_FLOOR = 1e-8
"""Added to the mass of a head before a division by it."""


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype of statistics, scores and memberships: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def running_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums over any number of tokens: float64, or float32 on mps, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
