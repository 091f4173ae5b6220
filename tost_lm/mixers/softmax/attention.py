"""Causal attention of the tokens of one call to those of their document, full or in a sliding window.

On CUDA in 16-bit types it is one call of flash attention for all documents. Elsewhere rows are cut into tiles of
queries, and documents are attended to one after another: on CPUs, a masked call of several was slower than calls of
8 tokens.

Shapes: B rows, H heads of queries, G heads of keys and values (each of H/G adjacent ones), T queries, S ≥ T keys, D
channels a head, M tokens of all documents.
"""

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from tost_lm.mixers.softmax.cache import KeysAndValues
from tost_lm.ops.backends import HALF_PRECISION, Backend, choose, obstacle_to_kernels
from tost_lm.ops.layout import cached_on_device, to_device
from tost_lm.torch_internals import FlashOffsets, flash_attention

MIN_TILE_TOKENS, MAX_TILE_TOKENS = 128, 1024
MAX_FLASH_CHANNELS = 256
Documents = tuple[tuple[int, ...], tuple[int, ...]]
"""Queries of each document of a row, and keys of each."""


def attend(q_BHTD: Tensor, kv: KeysAndValues, window: int, documents: Documents | None = None) -> Tensor:
    """`causal_attention` of rows or, in one row, in each document, by the fastest code.

    Args:
        kv: keys and values of all documents, of tokens up to the last query of each.
    """
    return choose(BACKENDS, q_BHTD)(q_BHTD, kv, window, documents)


def obstacle_to_flash(q: Tensor) -> str | None:
    """The reason why flash attention cannot compute these queries, or None."""
    D = q.shape[-1]
    if D % 8 or D > MAX_FLASH_CHANNELS:
        return f"heads have {D} channels, but its kernels need a multiple of 8 up to {MAX_FLASH_CHANNELS}"
    return obstacle_to_kernels(q, HALF_PRECISION)


def flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int = 0, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """y [B, H, T, D], and the log-sum-exp of the scores [B, H, T]."""
    B, _, T, _ = q.shape
    q_MHD, k_SGD, v_SGD = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    y_MHD, log_sum_HM = flash_attention(q_MHD, k_SGD, v_SGD, flash_offsets(q, k, documents), causal, window)
    return y_MHD.unflatten(0, (B, T)).transpose(1, 2), log_sum_HM.unflatten(1, (B, T)).transpose(0, 1)


def _by_tiles(q: Tensor, kv: KeysAndValues, window: int, documents: Documents | None) -> Tensor:
    if documents is None:
        return causal_attention(q, *kv, window)
    lengths, keys = documents
    split = zip(q.split(lengths, 2), kv[0].split(keys, 2), kv[1].split(keys, 2), strict=True)
    return torch.cat([causal_attention(*document, window) for document in split], 2)


BACKENDS = [
    Backend("flash", obstacle_to_flash, lambda q, kv, *others: flash(q, kv[0], kv[1], True, *others)[0]),
    Backend("tiles", None, _by_tiles),
]


def flash_offsets(q: Tensor, k: Tensor, documents: Documents | None = None) -> FlashOffsets:
    """The offsets of documents, or else of rows."""
    lengths, keys = documents or ((x.shape[2],) * len(x) for x in (q, k))
    return _offsets(lengths, q.device), _offsets(keys, q.device), max(lengths), max(keys)


@cached_on_device(maxsize=128)
def _offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [N + 1], cached for all layers of a call."""
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def causal_attention(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, window: int = 0, before_B: Tensor | None = None
) -> Tensor:
    """Attention of the last T of S tokens, each to itself and the tokens before it.

    Args:
        q_BHTD: queries of the last T tokens.
        k_BGSD: keys of all S ≥ T tokens. With G < H heads, each is that of H/G adjacent heads of the queries.
        v_BGSD: their values.
        window: a token attends to itself and the window − 1 tokens before it; 0: to all tokens before it.
        before_B: int64, the number of tokens of each row before the last T. Keys further left are padding, which is
            masked. None: no padding.

    Returns:
        y [B, H, T, D]. Without earlier keys and with a window of all tokens, torch's causal kernel computes it (flash
        attention where available). Otherwise it is computed for one tile of queries at a time, with the keys in its
        window.
    """
    T, S = q_BHTD.shape[2], k_BGSD.shape[2]
    window = min(window or S, S)
    if T == 1:
        visible_BS = None
        if before_B is not None:
            visible_BS = torch.arange(S - window, S, device=q_BHTD.device) >= (S - 1 - before_B)[:, None]
        return attend_one(q_BHTD, k_BGSD[:, :, S - window :], v_BGSD[:, :, S - window :], visible_BS)
    # On a GPU, only the kernels of 16-bit types share keys between heads; others would compute T × T scores.
    grouped = k_BGSD.shape[1] != q_BHTD.shape[1]
    kernel_exists = not grouped or q_BHTD.is_cpu or q_BHTD.dtype in (torch.float16, torch.bfloat16)
    if before_B is None and window == S and T == S and kernel_exists:
        return _attention(q_BHTD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=grouped)
    tile = min(max(window, MIN_TILE_TOKENS), MAX_TILE_TOKENS)
    sizes = [min(tile, T - start) for start in range(0, T, tile)]
    # Split, not sliced: the backward of each slice would allocate a tensor of all S tokens.
    key_tiles, value_tiles = k_BGSD.split([S - T, *sizes], 2), v_BGSD.split([S - T, *sizes], 2)
    first_key = None if before_B is None else (S - T - before_B)[:, None, None, None]
    start, ys = S - T, []
    starts = [0]  # of the key tiles
    for n, q in enumerate(q_BHTD.split(sizes, 2), 1):
        starts.append(start)
        first = max(i for i in range(n + 1) if starts[i] <= max(0, start - window + 1))
        tiles = *key_tiles[first : n + 1], *value_tiles[first : n + 1]
        # The backward computes a tile again instead of storing its mask and its copy of the keys.
        attend = partial(_attend, start, starts[first], window)
        ys.append(checkpoint(attend, first_key, q, *tiles, use_reentrant=False, preserve_rng_state=False))
        start += q.shape[2]
    return torch.cat(ys, 2)


def attend_one(q_BH1D: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, visible_BS: Tensor | None) -> Tensor:
    """Attention of one token to the visible keys; None: to all. Heads that share keys are computed as tokens, so that
    no key is copied."""
    mask = None if visible_BS is None else visible_BS[:, None, None]
    q_BGhD = q_BH1D.squeeze(2).unflatten(1, (k_BGSD.shape[1], -1))
    return _attention(q_BGhD, k_BGSD, v_BGSD, attn_mask=mask).flatten(1, 2)[:, :, None]


def _attend(
    query_start: int, key_start: int, window: int, first_key: Tensor | None, q_BHTD: Tensor, *keys_and_values: Tensor
) -> Tensor:
    half = len(keys_and_values) // 2
    k_BGSD, v_BGSD = torch.cat(keys_and_values[:half], 2), torch.cat(keys_and_values[half:], 2)
    k_BHSD, v_BHSD = (x.repeat_interleave(q_BHTD.shape[1] // x.shape[1], 1) for x in (k_BGSD, v_BGSD))
    i_T1 = torch.arange(query_start, query_start + q_BHTD.shape[2], device=q_BHTD.device)[:, None]
    j_S = torch.arange(key_start, key_start + k_BHSD.shape[2], device=q_BHTD.device)
    visible = (j_S <= i_T1) & (j_S > i_T1 - window)
    if first_key is not None:
        visible = visible & (j_S >= first_key)
    return _attention(q_BHTD, k_BHSD, v_BHSD, attn_mask=visible)


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's attention, but not by cuDNN, which torch prefers on Hopper where there is a mask: its gradients are wrong
    for 64, 192, 320, … keys (pytorch/pytorch#196678), and it makes a plan for each shape."""
    cuda = torch.backends.cuda
    # Graphs cannot contain the switch; what they compute here has no mask or a dtype that cuDNN lacks.
    if torch.compiler.is_compiling() or not cuda.cudnn_sdp_enabled():
        return scaled_dot_product_attention(q, k, v, **options)
    cuda.enable_cudnn_sdp(False)
    try:
        return scaled_dot_product_attention(q, k, v, **options)
    finally:
        cuda.enable_cudnn_sdp(True)
