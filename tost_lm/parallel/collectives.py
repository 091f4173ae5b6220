"""The collectives of the model, each with its axis passed explicitly.

They are torch's functional collectives, operators that the dispatcher sees: started without waiting, counted in tests,
and kept by selective activation checkpointing, so that recomputation sends none of them again. (megatron-core's own
calls, between tensor ranks, it repeats.)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tost_lm.parallel.mesh import Axis

OPERATORS = torch.ops._c10d_functional

Pending = Callable[[], Tensor]


def all_gather(x: Tensor, axis: Axis) -> Pending:
    """Start gathering equally shaped x of every rank; the call waits for them, [R, …] in order of rank."""
    gathered = OPERATORS.all_gather_into_tensor(x.contiguous(), axis.size, axis.group.group_name)
    return lambda: OPERATORS.wait_tensor(gathered).view(axis.size, *x.shape)


def reduce_scatter(x_R: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of what each has for this one: x_R is [R, …], the result […]."""
    scattered = OPERATORS.reduce_scatter_tensor(x_R.flatten(0, 1).contiguous(), "sum", axis.size, axis.group.group_name)
    return OPERATORS.wait_tensor(scattered).view(x_R.shape[1:])


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks; one rank sends nothing, so it may be on a device that no backend serves."""
    if axis.size == 1:
        return x
    return OPERATORS.wait_tensor(OPERATORS.all_reduce(x.contiguous(), "sum", axis.group.group_name))


def _keep(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    is_collective = operator.namespace == OPERATORS.name
    return CheckpointPolicy.MUST_SAVE if is_collective else CheckpointPolicy.PREFER_RECOMPUTE


keep_received = partial(create_selective_checkpoint_contexts, _keep)
"""`torch.utils.checkpoint.checkpoint(…, use_reentrant=False, context_fn=keep_received)` keeps what was received."""
