"""Causal softmax attention of the last tokens of a sequence, full or in a sliding window, in memory linear in T."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

SMALLEST_BLOCK, LARGEST_BLOCK = 128, 1024


def causal_attention(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, window: int = 0, before_B: Tensor | None = None
) -> Tensor:
    """Attention of the last T of S tokens, each to itself and those before it.

    Args:
        q_BHTD: queries of the last T tokens.
        k_BHSD: keys of all S ≥ T tokens.
        v_BHSD: their values.
        window: a token attends to itself and the window − 1 before it; 0: to all before it.
        before_B: int64, how many of the S − T leading keys are a row's own (more count as all); what stands to the
            left of them is not attended to. None: all are.

    Returns:
        y [B, H, T, D]. Without leading keys and without a window that cuts, the plain causal kernel computes it
        (flash where it can), else blocks of queries are computed one by one, each with the keys in its reach.
    """
    T, S = q_BHTD.shape[2], k_BHSD.shape[2]
    window = min(window or S, S)
    if before_B is None and window == S and T in (1, S):
        return scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, is_causal=T == S)
    block = min(max(window, SMALLEST_BLOCK), LARGEST_BLOCK)
    sizes = [min(block, T - start) for start in range(0, T, block)]
    # Split, not sliced: the backward of each slice would fill a tensor of all S tokens.
    key_pieces, value_pieces = k_BHSD.split([S - T, *sizes], 2), v_BHSD.split([S - T, *sizes], 2)
    first_key = None if before_B is None else (S - T - before_B)[:, None, None, None]
    start, blocks = S - T, []
    begins = [0]  # of the pieces
    for n, q in enumerate(q_BHTD.split(sizes, 2), 1):
        begins.append(start)
        first = max(i for i in range(n + 1) if begins[i] <= max(0, start - window + 1))
        # Computed again in the backward, so that no block keeps its mask and its copy of the keys.
        blocks.append(checkpoint(
            _attend, q, key_pieces[first : n + 1], value_pieces[first : n + 1], start, begins[first], window, first_key,
            use_reentrant=False, preserve_rng_state=False,
        ))  # fmt: skip
        start += q.shape[2]
    return torch.cat(blocks, 2)


def _attend(
    q_BHTD: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    query_start: int,
    key_start: int,
    window: int,
    first_key: Tensor | None,
) -> Tensor:
    k_BHSD, v_BHSD = torch.cat(keys, 2), torch.cat(values, 2)
    i_T1 = torch.arange(query_start, query_start + q_BHTD.shape[2], device=q_BHTD.device)[:, None]
    j_S = torch.arange(key_start, key_start + k_BHSD.shape[2], device=q_BHTD.device)
    visible = (j_S <= i_T1) & (j_S > i_T1 - window)
    if first_key is not None:
        visible = visible & (j_S >= first_key)
    return scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, attn_mask=visible)
