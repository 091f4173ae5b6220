"""Activations of a rank during training, planned from the settings alone. Symbols as in `plan_memory`.

They are what autograd stores for the backward. The unit is e·C/t bytes per token. A T layer takes 16: inputs of two
norms 2, of four linear layers 1 + 1 + 1 + 4, of GELU 4, of two LayerScales 2, and the operator's w 1. Without
LayerScale it takes 2 less. An A layer stores q, k and v (3) in place of w. With rotary embedding it stores 5, because
v keeps the memory of all three, and without a window on one sequence rank 6: the kernel's output and a copy of it.
With `model.kv_heads`, k and v are narrower. With `model.qk_norm` it stores q and k before and after the norm, and 4
bytes for each of their heads. With several sequence ranks it stores k and v of the whole sequence; with a window of w
tokens those of the last w − 1 of each rank, and of its own. In bytes per token there are also the memberships Π 4·H,
the sums before each chunk 4·(2C + H) per chunk or attention's 4·H, the norms' statistics 16 (RMSNorm 8), and the
input of the last norm e·C. On a CPU, RMSNorm stores its input and the normalized input in float32, 8·C in place of
e·C. A SwiGLU stores 4 tensors of its hidden channels, in place of 8.

An S layer with S slots and V value channels a head stores other tensors in place of w and of the output projection's
input (1 + 1). In bytes per token and slot: the convolution's input e, its output 4 and memberships 8. Per token and
value channel: what was read 4, and e each for norm, scale, gate and the output projection's input. Values and, in
float32, read scores keep the memory of the input projection's output, 2·e·H·(S + V); in bfloat16 the scores' copy takes
4·H·S. On a GPU there are also float32 values, 4·H·V, and M and N before each chunk of 64 tokens in float32, 4·H·S·(V +
1); on a CPU, M and N in float64 for each row and for every 2¹⁸/(32·H) tokens. With several sequence ranks they are
stored twice. The norm stores 4·H.

The residual stream is float32: where a block's or a branch's input is stored for recomputation, it takes 4·C/t.

`memory.mlp_tile_tokens`: the MLP branch stores its input in place of all others. The rest exists for one tile.

`memory.activation_checkpointing = "full"`: a block stores its input, and what it received from other ranks. That is 2·s
in an A layer, the keys and values of all sequence ranks (with a window of their last tokens), 4·t bytes in a T layer,
and in an S layer up to 16 states of each row (`exchanged_rows`). One whole block exists during its backward, and the
gradients in its MLP take 4 more (of a SwiGLU twice its hidden channels).
"""

from typing import NamedTuple

from tost_lm.model.config import CONV_TAPS
from tost_lm.model.flops import layers_by_letter
from tost_lm.parallel.settings import ALL_GATHER_RANKS
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.sizes import (
    CPU_CHUNK_ELEMENTS,
    SLOT_CHUNK_TOKENS,
    SLOT_GROUP_ELEMENTS,
    TRITON_CHUNK_TOKENS,
    TRITON_SLOT_CHUNK_TOKENS,
)

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def micro_batch_tokens(config: PretrainConfig) -> float:
    """Tokens of a micro-batch on a sequence rank."""
    return config.train.micro_batch_size * config.train.seq_len / config.parallel.sequence


def tokens_in_memory(config: PretrainConfig) -> float:
    """Tokens of a micro-batch on a sequence rank that are in memory at once: those of a tile, or all."""
    return micro_batch_tokens(config) * config.tile_tokens / config.row_tokens


def slot_state_bytes(config: PretrainConfig) -> float:
    """Bytes of a row's state in an S layer: M and N in float64, and the convolution's last keys."""
    model = config.model
    keys = ELEMENT_BYTES[config.train.dtype] * (CONV_TAPS - 1)
    return model.heads * model.slots * (8 * (model.slot_channels + 1) + keys)


def activation_bytes_per_token(config: PretrainConfig) -> float:
    """Bytes per token that autograd stores until the backward."""
    layers = layers_by_letter(config.model)
    blocks = sum(count * _block_bytes_per_token(config, letter).kept for letter, count in layers.items())
    return blocks + _norm_input_bytes(config) / config.parallel.tensor


class BlockBytes(NamedTuple):
    """Bytes of a block's activations."""

    kept: float
    """Stored from its forward to its backward."""
    in_backward: float
    """In addition, during its backward."""


def block_bytes(config: PretrainConfig) -> BlockBytes:
    """Bytes for a micro-batch, in the kind of block that has most."""
    tokens, e, tensor = tokens_in_memory(config), ELEMENT_BYTES[config.train.dtype], config.parallel.tensor
    stream = e * config.model.width / tensor
    blocks = [
        _block_bytes_per_token(config, letter) for letter, count in layers_by_letter(config.model).items() if count
    ]
    kept, in_backward = (tokens * max(sizes) for sizes in zip(*blocks, strict=True))
    gradients = _mlp_tensors(config)[1] * e * config.model.mlp_width / tensor
    if config.memory.mlp_tile_tokens is None:
        return BlockBytes(kept, in_backward + gradients * tokens)
    row_tokens = config.tile_tokens / config.parallel.sequence
    tile = tokens / row_tokens * min(config.memory.mlp_tile_tokens * tensor, row_tokens)
    return BlockBytes(kept, in_backward + 3 * stream * tokens + (_mlp_bytes_per_token(config) + gradients) * tile)


def _block_bytes_per_token(config: PretrainConfig, letter: str) -> BlockBytes:
    """Bytes per token without gradients, and without the MLP if it is tiled."""
    model, parallel = config.model, config.parallel
    C, H, e, ranks = model.width, model.heads, ELEMENT_BYTES[config.train.dtype], parallel.sequence
    stream, residual, scale = e * C / parallel.tensor, 4 * C / parallel.tensor, 1 if model.layer_scale else 0
    if letter == "T":
        if config.run.device == "cpu":
            chunk = min(config.tile_tokens / ranks, max(32, CPU_CHUNK_ELEMENTS // C))
        else:
            chunk = TRITON_CHUNK_TOKENS
        mixer = e * C + 4 * H + 4 * (2 * C + H) / chunk
        received = 4.0 * parallel.tensor if parallel.tensor > 1 else 0.0
    elif letter == "S":
        mixer = slot_bytes_per_token(config) - e * C
        row_tokens = config.tile_tokens / ranks
        rows = exchanged_rows(config)
        received = rows * slot_state_bytes(config) / row_tokens / parallel.tensor if ranks > 1 else 0.0
    else:
        here = config.tile_tokens / ranks
        rotary, gathered = bool(model.rope_theta), ranks * gathered_tokens(config, config.tile_tokens) / here
        beside = 2 * (gathered + 1 if model.window else gathered)  # gathered keys and values, with a window also a copy
        projected, read = C + 2 * model.kv_width, C + model.kv_width  # read: queries and keys
        changed = rotary or model.qk_norm
        if ranks > 1:
            kept = projected if model.qk_norm or not rotary else 0
            attention = (C if changed else 0) + kept + beside * model.kv_width
        else:
            # Without a window, the kernel stores its output in the order of q's memory, the projection a copy of it.
            attention = projected + (read if changed else 0) + (C if changed and not model.window else 0)
        mixer = e * attention + 4 * H
        if model.qk_norm:
            mixer += 4 * read * H / C + _head_norm_bytes(config) * read
        received = 2 * gathered * e * model.kv_width / parallel.tensor if ranks > 1 else 0.0
    mixer = (2 + scale) * stream + (_norm_bytes(config) + mixer) / parallel.tensor
    kept = mixer + (_mlp_bytes_per_token(config) if config.memory.mlp_tile_tokens is None else residual)
    if config.memory.activation_checkpointing == "none":
        return BlockBytes(kept, 0.0)
    same = stream if e == 4 else 0.0  # in bfloat16 the first norm stores a rounded copy of the block's input
    return BlockBytes(residual + received, kept - same)


def exchanged_rows(config: PretrainConfig) -> int:
    """Rows of statistics that a rank receives in an exchange, its own included: of all ranks, or in all-to-alls its
    columns of all, the sums before it, and with tiles those over all ranks."""
    ranks = config.parallel.sequence
    return ranks if ranks <= ALL_GATHER_RANKS else 2 + (config.tile_tokens < config.row_tokens)


def gathered_tokens(config: PretrainConfig, tokens: int) -> float:
    """The number of tokens of a row on a sequence rank whose keys and values other ranks receive in an A layer."""
    window, here = config.model.window, tokens / config.parallel.sequence
    return min(here, max(1, window - 1)) if window else here


def slot_bytes_per_token(config: PretrainConfig) -> float:
    """Bytes per token that an S layer stores between its projections."""
    model, ranks, e = config.model, config.parallel.sequence, ELEMENT_BYTES[config.train.dtype]
    slots, values = model.heads * model.slots, model.heads * model.slot_channels
    projected = 2 * e * (slots + values) + (4 * slots if e == 2 else 0)
    state = slots * (model.slot_channels + 1)
    states = (2 if ranks > 1 else 1) * state
    if config.run.device == "cpu":
        at_once = SLOT_CHUNK_TOKENS * max(1, SLOT_GROUP_ELEMENTS // (model.heads * SLOT_CHUNK_TOKENS**2))
        in_operator = 8 * (states / min(at_once, micro_batch_tokens(config)) + state / (config.tile_tokens / ranks))
    else:
        in_operator = 4 * values + 4 * states / min(TRITON_SLOT_CHUNK_TOKENS, config.tile_tokens / ranks)
    return (12 + e) * slots + (4 + 4 * e) * values + projected + in_operator + 4 * model.heads


def _mlp_bytes_per_token(config: PretrainConfig) -> float:
    model, e = config.model, ELEMENT_BYTES[config.train.dtype]
    channels = (2 if model.layer_scale else 1) * model.width + _mlp_tensors(config)[0] * model.mlp_width
    return (_norm_bytes(config) + e * channels) / config.parallel.tensor


def _mlp_tensors(config: PretrainConfig) -> tuple[int, int]:
    """Tensors of hidden channels that an MLP stores, and those of its backward in addition."""
    return (4, 2) if config.model.mlp == "swiglu" else (2, 1)


def _norm_bytes(config: PretrainConfig) -> float:
    """Bytes per token that a norm stores: its input, and the mean (not of RMSNorm) and deviation of its channels."""
    return _norm_input_bytes(config) + (4 if config.model.norm == "rms" else 8)


def _norm_input_bytes(config: PretrainConfig) -> float:
    if config.model.norm == "rms" and config.run.device == "cpu":
        return 8 * config.model.width  # float32, and normalized
    return ELEMENT_BYTES[config.train.dtype] * config.model.width


def _head_norm_bytes(config: PretrainConfig) -> int:
    """Bytes per channel of queries and keys that their norm stores beside its input, which the values keep anyway: on a
    CPU the input in float32, and normalized."""
    if config.run.device != "cpu":
        return 0
    return 4 if config.train.dtype == "float32" else 8
