"""Slot memory as the formulas are written, with a [T, T] decay mask: the reference of every test."""

import torch
from torch import Tensor

from tost_lm.ops.naive import MASS_FLOOR


def slot_memory_naive(read_BTHS: Tensor, write_BTHS: Tensor, value_BTHD: Tensor, log_decay_H: Tensor) -> Tensor:
    """y [B, T, H, D] of whole rows that start empty."""
    t = torch.arange(read_BTHS.shape[1], device=read_BTHS.device)
    age_TT = t[:, None] - t
    log_HTT = log_decay_H[:, None, None] * age_TT
    mask_HTT = log_HTT.masked_fill(age_TT < 0, -torch.inf).exp()
    mass_BTHS = torch.einsum("hij,bjhs->bihs", mask_HTT, write_BTHS)
    memory_BTHSD = torch.einsum("hij,bjhs,bjhd->bihsd", mask_HTT, write_BTHS, value_BTHD)
    return torch.einsum("bihs,bihsd->bihd", read_BTHS / (mass_BTHS + MASS_FLOOR), memory_BTHSD)
