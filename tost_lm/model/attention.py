"""Causal softmax attention of the last tokens of a sequence, full or with a sliding window, in memory linear in T."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

MIN_TILE_TOKENS, MAX_TILE_TOKENS = 128, 1024


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
    # On a GPU, only the kernels of 16-bit types share keys between heads; others would compute T × T scores.
    grouped = k_BGSD.shape[1] != q_BHTD.shape[1]
    kernel_exists = not grouped or q_BHTD.is_cpu or q_BHTD.dtype in (torch.float16, torch.bfloat16)
    if before_B is None and window == S and T in (1, S) and kernel_exists:
        return scaled_dot_product_attention(q_BHTD, k_BGSD, v_BGSD, is_causal=T == S, enable_gqa=grouped)
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
        ys.append(_Tile.apply(start, starts[first], window, first_key, q, *tiles))  # pyright: ignore[reportArgumentType]
        start += q.shape[2]
    return torch.cat(ys, 2)


class _Tile(torch.autograd.Function):
    """The backward computes a tile again instead of storing its mask and its copy of the keys."""

    @staticmethod
    def forward(ctx, query_start: int, key_start: int, window: int, first_key: Tensor | None, *qkv: Tensor) -> Tensor:
        device = qkv[0].device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.where = query_start, key_start, window
        ctx.save_for_backward(first_key, *qkv)
        return _attend(*ctx.where, first_key, *qkv)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BHTD: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        first_key, *qkv = ctx.saved_tensors
        leaves = [x.detach().requires_grad_() for x in qkv]
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            y_BHTD = _attend(*ctx.where, first_key, *leaves)
        return None, None, None, None, *torch.autograd.grad(y_BHTD, leaves, dy_BHTD)


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
    return scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, attn_mask=visible)
