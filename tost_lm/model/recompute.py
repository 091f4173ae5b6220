"""Holding less for the backward: whole blocks, or portions of their MLPs, are computed again in it."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from tost_lm.model.block import Block, Way
from tost_lm.model.lm import TostLM


def hold_less(
    model: TostLM,
    *,
    recompute: Literal["nothing", "blocks"] = "nothing",
    mlp_tokens: int | None = None,
    context_fn: Callable[[], Any] = noop_context_fn,
) -> TostLM:
    """Let the backward of a model compute again what it would hold, in place; outputs and gradients are the same.

    Args:
        recompute: `blocks` keeps the input of each block and computes the block again.
        mlp_tokens: each block's second branch (norm, MLP, LayerScale, sum) takes so many tokens of each row at once,
            keeps what goes into it and computes it again; a token's 8·C wide activations are there for one portion
            only. Of rows that lie on several ranks, those in the residual stream here.
        context_fn: of `torch.utils.checkpoint.checkpoint`, for blocks: what besides their input is kept.
    """
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    for block in blocks:
        if recompute == "blocks":
            block.way = _again(context_fn)
        if mlp_tokens is not None:
            block.mlp_way = partial(_in_portions, mlp_tokens)
    return model


def _again(context_fn: Callable[[], Any] = noop_context_fn) -> Way:
    # Nothing in a block is random.
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)


def _in_portions(tokens: int, compute: Callable[[Tensor], Tensor], x_BTC: Tensor) -> Tensor:
    again = _again()
    # Split, not sliced: the backward of each slice would fill a tensor of all tokens.
    return torch.cat([again(compute, portion) for portion in x_BTC.split(tokens, 1)], 1)
