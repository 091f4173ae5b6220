"""Activations of a rank during training, planned from the settings alone. Symbols as in `memory.py`.

They are what autograd stores for the backward. In units of e·C/t bytes per token, a block takes 14: inputs of two norms
2, of the linear layers beside the last one of the mixer 1 + 1 + 4, of GELU 4, of two LayerScales 2. Without LayerScale
it takes 2 less. What a mixer stores between its projections is in its spec (`tost_lm/mixers/*/spec.py`). In bytes per
token there are also the norms' statistics 16 (RMSNorm 8), and the input of the last norm e·C. On a CPU, RMSNorm stores
its input and the normalized input in float32, 8·C in place of e·C; a zero-centered one stores the normalized input
everywhere, e·C more. A SwiGLU stores 4 tensors of its hidden channels, in place of 8.

The residual stream is float32: where a block's or a branch's input is stored for recomputation, it takes 4·C/t.

`memory.mlp_tile_tokens`: the MLP branch stores its input in place of all others. The rest exists for one tile.

`memory.activation_checkpointing = "full"`: a block stores its input, and what its mixer received from other ranks. One
whole block exists during its backward, and the gradients in its MLP take 4 more (of a SwiGLU twice its hidden
channels).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from tost_lm.mixers.spec import Costs, Load, MixerSpec
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.sizes import ALL_GATHER_RANKS

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def tiles(config: PretrainConfig) -> int:
    """Tiles of a row."""
    return math.ceil(config.row_tokens / config.tile_tokens)


def micro_batch_tokens(config: PretrainConfig) -> float:
    """Tokens of a micro-batch on a sequence rank."""
    return config.train.micro_batch_size * config.train.seq_len / config.parallel.sequence


def tokens_in_memory(config: PretrainConfig) -> float:
    """Tokens of a micro-batch on a sequence rank that are in memory at once: those of a tile, or all."""
    return micro_batch_tokens(config) * config.tile_tokens / config.row_tokens


def load_of(config: PretrainConfig, spec: MixerSpec) -> Load:
    """The micro-batch of a rank, for the spec of a mixer."""
    ranks = config.parallel.sequence
    return Load(
        config.model.shape_of(spec.letter), ELEMENT_BYTES[config.train.dtype], config.run.device == "cpu",
        micro_batch_tokens(config), config.row_tokens, config.tile_tokens, ranks, config.parallel.tensor,
        gathers=ranks <= ALL_GATHER_RANKS,
    )  # fmt: skip


def costs_of(config: PretrainConfig, spec: MixerSpec) -> Costs:
    """What a layer of the mixer takes for this micro-batch."""
    return spec.costs(load_of(config, spec))


def over_layers(config: PretrainConfig, of_layer: Callable[[MixerSpec, Costs], float]) -> float:
    """The sum over all layers, given what one with a mixer and its costs adds."""
    mixers, letters = config.model.mixers, config.model.letters
    return sum(letters.count(spec.letter) * of_layer(spec, costs_of(config, spec)) for spec, _ in mixers)


def activation_bytes_per_token(config: PretrainConfig) -> float:
    """Bytes per token that autograd stores until the backward."""
    blocks = sum(block.kept for block in _blocks_per_token(config))
    return blocks + _norm_input_bytes(config) / config.parallel.tensor


class BlockBytes(NamedTuple):
    """Bytes of a block's activations."""

    kept: float
    """Stored from its forward to its backward."""
    in_backward: float
    """In addition, during its backward."""


def block_bytes(config: PretrainConfig) -> list[BlockBytes]:
    """Bytes of each block for a micro-batch."""
    tokens, e, tensor = tokens_in_memory(config), ELEMENT_BYTES[config.train.dtype], config.parallel.tensor
    in_mlp = _mlp_tensors(config)[1] * e * config.model.mlp_width / tensor * tokens  # gradients
    if config.memory.mlp_tile_tokens:
        row_tokens = config.tile_tokens / config.parallel.sequence
        fraction = min(config.memory.mlp_tile_tokens * tensor, row_tokens) / row_tokens
        in_mlp = 3 * e * config.model.width / tensor * tokens + fraction * (
            _mlp_bytes_per_token(config) * tokens + in_mlp
        )
    return [BlockBytes(tokens * block.kept, tokens * block.in_backward + in_mlp) for block in _blocks_per_token(config)]


def _blocks_per_token(config: PretrainConfig) -> list[BlockBytes]:
    of_letter = {spec.letter: _block_bytes_per_token(config, spec) for spec, _ in config.model.mixers}
    return [of_letter[letter] for letter in config.model.letters]


def _block_bytes_per_token(config: PretrainConfig, mixer: MixerSpec) -> BlockBytes:
    """Bytes per token without gradients, and without the MLP if it is tiled."""
    costs, C, scale = costs_of(config, mixer), config.model.width, 1 if config.model.layer_scale else 0
    e, tensor = ELEMENT_BYTES[config.train.dtype], config.parallel.tensor
    stream, residual = e * C / tensor, 4 * C / tensor
    of_mixer = (1 + scale) * stream + (_norm_bytes(config) + costs.stored) / tensor
    of_mlp = residual if config.memory.mlp_tile_tokens else _mlp_bytes_per_token(config)
    if config.memory.activation_checkpointing == "none":
        return BlockBytes(of_mixer + of_mlp, 0.0)
    same = stream if e == 4 else 0.0  # in bfloat16 the first norm stores a rounded copy of the block's input
    return BlockBytes(residual + costs.received, of_mixer + of_mlp - same)


def _mlp_bytes_per_token(config: PretrainConfig) -> float:
    model, e = config.model, ELEMENT_BYTES[config.train.dtype]
    channels = (2 if model.layer_scale else 1) * model.width + _mlp_tensors(config)[0] * model.mlp_width
    return (_norm_bytes(config) + e * channels) / config.parallel.tensor


def _mlp_tensors(config: PretrainConfig) -> tuple[int, int]:
    """Tensors of hidden channels that an MLP stores, and those of its backward in addition."""
    return (4, 2) if config.model.mlp == "swiglu" else (2, 1)


def _norm_bytes(config: PretrainConfig) -> float:
    """Bytes per token that a norm stores: its input, and the mean (not of RMSNorm) and deviation of its channels."""
    return _norm_input_bytes(config) + (8 if config.model.norm == "layer" else 4)


def _norm_input_bytes(config: PretrainConfig) -> float:
    norm, on_cpu, e = config.model.norm, config.run.device == "cpu", ELEMENT_BYTES[config.train.dtype]
    read = 4 if on_cpu and norm != "layer" else e
    normalized = {"layer": 0, "rms": 4 if on_cpu else 0, "rms-zero-centered": e}[norm]
    return config.model.width * (read + normalized)
