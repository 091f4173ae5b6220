"""Decayed running sums of a causal sequence: the reference that every form is built on.

Shapes: B sequences, H heads, T tokens, E values, S slots. The sum at t is Σ_{s≤t} exp(Σ_{s<i≤t} log_i) · v_s,
with log-decays `log` [B, H, T], or [1, H, 1] if they are constant. Decays are masked before exp, and nothing
is divided by one. `chunk` bounds the dense [chunk × chunk] masks; the sums are the same for every chunk, and a chunk of
T or more is one [T × T] mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad


def decay_mask(log_T: Tensor) -> Tensor:
    """exp(Σ_{s<i≤t} log_i) at s ≤ t, else 0: […, T, T] of log-decays […, T]."""
    total = log_T.cumsum(-1)
    earlier = torch.ones(2 * total.shape[-1:], dtype=torch.bool, device=log_T.device).tril()
    return (total[..., :, None] - total[..., None, :]).masked_fill(~earlier, -torch.inf).exp()


def decayed_sum(v_BHTE: Tensor, log: Tensor, chunk: int) -> Tensor:
    """The sum up to and including each token, [B, H, T, E]."""
    T = v_BHTE.shape[2]
    v_BHKcE, log_BHKc = _chunks(v_BHTE, chunk), _log_chunks(log, T, chunk)
    sums = torch.einsum("bhkts,bhkse->bhkte", decay_mask(log_BHKc), v_BHKcE)
    if chunk < T:
        before_BHKE = _before(sums[..., -1, :], log_BHKc, chunk)
        sums = sums + log_BHKc.cumsum(-1).exp()[..., None] * before_BHKE[..., None, :]
    return sums.flatten(2, 3)[:, :, :T]


def decayed_read(q_BHTS: Tensor, k_BHTS: Tensor, v_BHTE: Tensor, log: Tensor, chunk: int) -> Tensor:
    """Σ_S q · (decayed sum of k ⊗ v), [B, H, T, E]: linear attention, without the S·E sums of each token."""
    T = v_BHTE.shape[2]
    q, k, v = (_chunks(x, chunk) for x in (q_BHTS, k_BHTS, v_BHTE))
    log_BHKc = _log_chunks(log, T, chunk)
    mask = decay_mask(log_BHKc)
    read = ((q @ k.mT) * mask) @ v
    if chunk < T:
        ends_BHKSE = (k * mask[..., -1, :, None]).mT @ v
        before = _before(ends_BHKSE.flatten(-2), log_BHKc, chunk).view_as(ends_BHKSE)
        read = read + (q * log_BHKc.cumsum(-1).exp()[..., None]) @ before
    return read.flatten(2, 3)[:, :, :T]


def resetting(add: Callable[..., Tensor], *x_BHTE: Tensor, log: Tensor, chunk: int, every: int) -> Tensor:
    """`add` of these tensors, where the sums start again after `every` tokens; 0: never."""
    B, _, T = x_BHTE[-1].shape[:3]
    if not every:
        return add(*x_BHTE, log, chunk)
    rows = lambda x: _chunks(x, every).transpose(1, 2).flatten(0, 1)
    log = log if log.shape[-1] == 1 else rows(log[..., None])[..., 0]
    sums = add(*map(rows, x_BHTE), log, chunk)
    return sums.unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)[:, :, :T]


def _before(ends_BHKE: Tensor, log_BHKc: Tensor, chunk: int) -> Tensor:
    """The sums before each chunk, from the sums of each chunk alone."""
    return pad(decayed_sum(ends_BHKE, log_BHKc.sum(-1), chunk), (0, 0, 1, 0))[:, :, :-1]


def _chunks(x_BHTE: Tensor, chunk: int) -> Tensor:
    """[B, H, K, chunk, E], with zeros after the last token."""
    T = x_BHTE.shape[2]
    chunk = min(chunk, T)
    return pad(x_BHTE, (0, 0, 0, -T % chunk)).unflatten(2, (-1, chunk))


def _log_chunks(log: Tensor, T: int, chunk: int) -> Tensor:
    """[B, H, K, chunk], or [1, H, 1, chunk] of constants."""
    if log.shape[-1] == 1 < T:
        return log[..., None].expand(*log.shape, min(chunk, T))
    return _chunks(log[..., None], chunk)[..., 0]
