"""Linear recurrences over a causal sequence, computed in chunks: what the mixers of constant state are built on.

Shapes: B sequences, H heads, T tokens, S keys (slots) of a head, E values of a head, c tokens of a chunk. `q`, `k` are
[B, H, T, S], `v` [B, H, T, E]; all results are [B, H, T, E]. Decays are given as logarithms ≤ 0 and masked before exp;
nothing is divided by one. The chunk bounds the dense masks and changes nothing else.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.linalg import solve_triangular

CHUNK = 32


def decayed_read(q: Tensor, k: Tensor, v: Tensor, log_BHT: Tensor, chunk: int = CHUNK) -> Tensor:
    """y = qᵀ M with M ← exp(log) M + k vᵀ: linear attention with a decay for each head."""
    state, outputs = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for q_c, k_c, v_c, log_c in _chunks(chunk, q, k, v, log_BHT):
        total, gaps = _decays(log_c)
        outputs.append(((q_c @ k_c.mT) * gaps) @ v_c + (q_c * total.exp()[..., None]) @ state)
        state = total[..., -1:, None].exp() * state + (k_c * gaps[..., -1, :, None]).mT @ v_c
    return torch.cat(outputs, 2)


def decayed_sum(k: Tensor, log_BHT: Tensor, chunk: int = CHUNK) -> Tensor:
    """The sum N ← exp(log) N + k at each token, [B, H, T, S]."""
    state, outputs = k.new_zeros(*k.shape[:2], 1, k.shape[-1]), []
    for k_c, log_c in _chunks(chunk, k, log_BHT):
        total, gaps = _decays(log_c)
        outputs.append(gaps @ k_c + total.exp()[..., None] * state)
        state = outputs[-1][..., -1:, :]
    return torch.cat(outputs, 2)


def windowed_decays(log_BHT: Tensor, window: int) -> Tensor:
    """exp(Σ_{s<i≤t} log_i) at t − window < s ≤ t, else 0: [B, H, T, T]."""
    _, gaps = _decays(log_BHT)
    return gaps.triu(1 - window)


def decayed_read_of_channels(q: Tensor, k: Tensor, v: Tensor, log_BHTS: Tensor, chunk: int = CHUNK) -> Tensor:
    """y = qᵀ M with M ← Diag(exp(log)) M + k vᵀ: a decay for each key, as in GLA (arXiv 2312.06635)."""
    state, outputs = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for q_c, k_c, v_c, log_c in _chunks(chunk, q, k, v, log_BHTS):
        total, gaps = _decays(log_c.mT)  # [B, H, S, c] and [B, H, S, c, c]
        scores = torch.einsum("bhts,bhus,bhstu->bhtu", q_c, k_c, gaps)
        outputs.append(scores @ v_c + (q_c * total.mT.exp()) @ state)
        state = total[..., -1:].exp() * state + (k_c * gaps[..., -1, :].mT).mT @ v_c
    return torch.cat(outputs, 2)


def gated_delta_read(q: Tensor, k: Tensor, v: Tensor, log_BHT: Tensor, beta_BHT: Tensor, chunk: int = CHUNK) -> Tensor:
    """y = qᵀ M with M ← exp(log) (I − β k kᵀ) M + β k vᵀ: Gated DeltaNet (arXiv 2412.06464).

    Within a chunk the written values v′ solve (I + A) v′ = β (v − exp(total) kᵀ M), with A the decayed β (k kᵀ) below
    the diagonal (the WY form of arXiv 2406.06484).
    """
    state, outputs = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for q_c, k_c, v_c, log_c, beta_c in _chunks(chunk, q, k, v, log_BHT, beta_BHT):
        total, gaps = _decays(log_c)
        from_start, beta = total.exp()[..., None], beta_c[..., None]
        system = (beta * (k_c @ k_c.mT) * gaps).tril(-1)
        written = solve_triangular(
            system, beta * (v_c - (k_c * from_start) @ state), upper=False, unitriangular=True
        )  # unitriangular: the diagonal counts as ones
        outputs.append(((q_c @ k_c.mT) * gaps) @ written + (q_c * from_start) @ state)
        state = total[..., -1:, None].exp() * state + (k_c * gaps[..., -1, :, None]).mT @ written
    return torch.cat(outputs, 2)


def _chunks(chunk: int, *x_BHT: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(chunk, 2) for x in x_BHT), strict=True)


def _decays(log_T: Tensor) -> tuple[Tensor, Tensor]:
    """The running sums of log-decays […, T], and exp(Σ_{s<i≤t} log_i) at s ≤ t, else 0: […, T, T]."""
    total = log_T.cumsum(-1)
    earlier = torch.ones(2 * total.shape[-1:], dtype=torch.bool, device=log_T.device).tril()
    return total, (total[..., :, None] - total[..., None, :]).masked_fill(~earlier, -torch.inf).exp()
