"""Transforms of a model's blocks for training, in place: activation checkpointing and `torch.compile`.

With activation checkpointing, the backward computes blocks or tiles of their MLPs again instead of storing them.

Compilation makes a few fused kernels of what surrounds the operator of the token mixer, which is called between graphs
(`TokenMixer.eager`). Blocks of a kind share graphs. These differ by layer kind, shapes, whether gradients are computed,
and whether there are states, but not by the documents of a batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from tost_lm.errors import ConfigError
from tost_lm.model.block import Block
from tost_lm.model.lm import TostLM
from tost_lm.torch_internals import allow_graphs, call, missing_compiler, use_private_inductor_cache

OPTIONS: Any = {"use_reentrant": False, "preserve_rng_state": False}  # blocks draw no random numbers


def apply_activation_checkpointing(
    model: TostLM,
    *,
    activation_checkpointing: Literal["none", "full"] = "none",
    mlp_tile_tokens: int = 0,
    context_fn: Callable[[], Any] = noop_context_fn,
) -> TostLM:
    """Install checkpoint wrappers in a model, in place. Outputs and gradients do not change.

    Args:
        activation_checkpointing: `full` stores the input of a block and computes the block again in the backward.
        mlp_tile_tokens: the MLP branch of each block (norm, MLP, LayerScale, sum) reads this many tokens of a row at a
            time, stores its input only, and is computed again. Activations of its hidden channels exist for one tile at
            a time. 0: whole rows, stored. With sequence or tensor ranks, the tokens are those of this rank's residual
            stream.
        context_fn: for blocks, the argument of `torch.utils.checkpoint.checkpoint`: what is stored besides the input.
    """
    is_full = activation_checkpointing == "full"
    whole = partial(checkpoint, **OPTIONS, context_fn=context_fn) if is_full else call
    mlp = partial(_in_tiles, mlp_tile_tokens) if mlp_tile_tokens else call
    for block in model.blocks:
        assert isinstance(block, Block)
        block.set_checkpoints(whole, mlp)
    return model


def _in_tiles(tile_tokens: int, compute: Callable[[Tensor], Tensor], x_BTC: Tensor) -> Tensor:
    # Split, not sliced: the backward of each slice would allocate a tensor of all tokens.
    return torch.cat([checkpoint(compute, tile, **OPTIONS) for tile in x_BTC.split(tile_tokens, 1)], 1)


GRAPHS = 64
"""Graphs of a process, at most: of a few kinds of layers, with and without gradients and states, in rows and tiles of a
few sizes. Beyond torch's limit of 8, others would not be compiled."""


def compile_blocks(model: TostLM) -> TostLM:
    """Compile each block of a model, in place. Outputs and gradients change by rounding only.

    Call it after `apply_activation_checkpointing`, not with tensor ranks. The first calls take about ten seconds for
    each graph.

    Raises:
        ConfigError: there is no compiler for the device of the model.
    """
    if missing := missing_compiler(model.embedding.weight.device):
        raise ConfigError(f"train.compile needs {missing}; install it, or set train.compile = false")
    allow_graphs(GRAPHS)
    use_private_inductor_cache()
    for block in model.blocks:
        assert isinstance(block, Block)
        block.compile_inside()
    return model
