"""Compilation of the blocks with `torch.compile`: what surrounds the token mixer becomes a few fused kernels.

The token mixer is one operator of the graph (`tost_lm.ops.registered`), so a block is one graph, and blocks of a kind
share it. Graphs differ by layer kind, shapes, whether gradients are computed, and whether there are states.
"""

import torch

from tost_lm.errors import ConfigError
from tost_lm.model.block import Block
from tost_lm.model.lm import TostLM
from tost_lm.torch_internals import allow_graphs, missing_compiler

GRAPHS = 64
"""Graphs of a process, at most: of a few kinds of layers, with and without gradients and states, in rows and tiles of a
few sizes. Beyond torch's limit of 8, a whole graph would be an error."""


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
    for block in model.blocks:
        assert isinstance(block, Block)
        block.compute = torch.compile(block.compute, fullgraph=True)
    return model
