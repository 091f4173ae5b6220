"""The collectives of the model, each over an explicit axis.

They are torch's functional collectives: asynchronous operators of the dispatcher. So tests can count them, and
selective activation checkpointing keeps their results. (Recomputation does repeat megatron-core's own collectives.)
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tost_lm.parallel.mesh import Axis
from tost_lm.torch_internals import FUNCTIONAL_COLLECTIVES

Pending = Callable[[], Tensor]


def all_gather(x: Tensor, axis: Axis) -> Pending:
    """Start gathering x, equally shaped on all R ranks. The returned function waits for the result [R, …]."""
    gathered = FUNCTIONAL_COLLECTIVES.all_gather_into_tensor(x.contiguous(), axis.size, axis.group.group_name)
    return lambda: FUNCTIONAL_COLLECTIVES.wait_tensor(gathered).view(axis.size, *x.shape)


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    """sent[r] of the rows of x [sum(sent), …] go to rank r, received[r] come from it: [sum(received), …], by rank."""
    exchanged = FUNCTIONAL_COLLECTIVES.all_to_all_single(x.contiguous(), [*received], [*sent], axis.group.group_name)
    return FUNCTIONAL_COLLECTIVES.wait_tensor(exchanged)


def reduce_scatter(x_R: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of row r of x_R [R, …], on rank r: […]."""
    scattered = FUNCTIONAL_COLLECTIVES.reduce_scatter_tensor(
        x_R.flatten(0, 1).contiguous(), "sum", axis.size, axis.group.group_name
    )
    return FUNCTIONAL_COLLECTIVES.wait_tensor(scattered).view(x_R.shape[1:])


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks. A single rank communicates nothing, so any device works."""
    if axis.size == 1:
        return x
    return FUNCTIONAL_COLLECTIVES.wait_tensor(
        FUNCTIONAL_COLLECTIVES.all_reduce(x.contiguous(), "sum", axis.group.group_name)
    )


def broadcast(x: Tensor, source: int, axis: Axis) -> None:
    """Overwrite x with that of rank `source`, in place, so not as a functional collective."""
    if axis.size > 1 and x.numel():
        dist.broadcast(x, group=axis.group, group_src=source)


def _keep(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    is_collective = operator.namespace == FUNCTIONAL_COLLECTIVES.name
    return CheckpointPolicy.MUST_SAVE if is_collective else CheckpointPolicy.PREFER_RECOMPUTE


keep_received = partial(create_selective_checkpoint_contexts, _keep)
"""`context_fn` of `torch.utils.checkpoint.checkpoint(…, use_reentrant=False)`: results of collectives are kept."""
