"""The update of a DeepSpeed engine: sums of gradients, their norm, clipping, and updates that can be skipped.

DeepSpeed's loops over parameters launch several operations for each. `ShortStep` does the same for bfloat16 at stage 1
with few, on the flat buffers, and waits for the device once.

DeepSpeed's private and undocumented names here:

    optimizer._global_grad_norm                                      the norm of the last step
    optimizer.bf16_groups, .fp32_groups_gradients_flat, .fp32_groups_gradients, .fp32_groups_has_gradients,
    .fp32_groups_flat_partition, .fp32_groups_gradient_flat_partition, ._lazy_init_hp_params_optimizer_state,
    .update_lp_params                                                bfloat16 at stage 1
    torch._foreach_copy_, ._foreach_add_                             operations on many tensors at once

Replaced:

    engine.clip_fp32_gradients                       clipping at stage 0, which then records its norm
    optimizer.update_hp_grads, .step, .overflow,
    partition.grad                                   bfloat16 at stage 1
    optimizer.step of torch's optimizer              an update that can be skipped, `SkippableStep`
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, _foreach_add_, _foreach_copy_, nn  # pyright: ignore[reportPrivateImportUsage]

from tost_lm.parallel.engine import counted_once, sum_of_squares
from tost_lm.parallel.mesh import Mesh, all_reduce
from tost_lm.sizes import CAST_ELEMENTS


def torch_optimizer(engine: Any) -> torch.optim.Optimizer:
    """torch's optimizer; its parameters are DeepSpeed's partitions."""
    return engine.optimizer if updates_parameters(engine) else engine.optimizer.optimizer


def updates_parameters(engine: Any) -> bool:
    """Whether torch's optimizer updates the model's parameters themselves: stage 0 in float32."""
    return isinstance(engine.optimizer, torch.optim.Optimizer)


class SkippableStep:
    """`engine.step()` that can skip the update once the global gradient norm is known."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        optimizer = torch_optimizer(engine)
        self._update, optimizer.step = optimizer.step, self._update_unless_skipped

    def __call__(self, is_allowed: Callable[[float], bool]) -> float:
        """After the last micro-batch: apply the update if `is_allowed(norm)`; otherwise weights and optimizer stay.

        Returns:
            The global gradient norm before clipping, equal on every rank; inf if it is not finite. Then the update is
            skipped in any case.
        """
        self._is_allowed, self._allowed = is_allowed, None
        self._engine.step()
        # Stages 1 to 3 detect non-finite gradients themselves and do not call the update.
        return math.inf if self._allowed is None else float(self._engine.get_global_grad_norm())

    def _update_unless_skipped(self, *arguments: Any, **options: Any) -> Any:
        if self._allowed is None:  # the first of several parameter groups
            norm = float(self._engine.optimizer._global_grad_norm)
            self._allowed = math.isfinite(norm) and self._is_allowed(norm)
        return self._update(*arguments, **options) if self._allowed else None


def clip_and_record_norm(engine: Any, mesh: Mesh) -> None:
    """For stage 0 in float32, where DeepSpeed clips by a norm that float32 adds up, and does not record it."""
    parameters = [p for p in engine.module.parameters() if p.grad is not None]
    squares = sum_of_squares(counted_once(((p, p.grad) for p in parameters), mesh))
    # Gradients of data and sequence ranks are equal. Their mean is also equal if their processors differ.
    replicas = mesh.replicas
    norm = (all_reduce(all_reduce(squares, mesh.tensor), replicas) / replicas.size).sqrt()
    engine.optimizer._global_grad_norm = float(norm)
    nn.utils.clip_grads_with_norm_(parameters, engine.gradient_clipping(), norm.float())


class ShortStep:
    """Sums, norm, clipping and update of bfloat16 at stage 1 (DeepSpeed's BF16_Optimizer), in place of its methods."""

    def __init__(self, engine: Any, mesh: Mesh) -> None:
        self._optimizer, self._mesh, self._clip = engine.optimizer, mesh, engine.gradient_clipping()
        groups = zip(self._optimizer.bf16_groups, self._optimizer.fp32_groups_gradients, strict=True)
        self._groups = [list(zip(*group, strict=True)) for group in groups]  # pairs of a parameter and its sum
        self._optimizer.update_hp_grads, self._optimizer.step = self.add_gradients, self.step

    @torch.no_grad()
    def add_gradients(self, clear_lp_grads: bool = False) -> None:
        """Add the gradients of a micro-batch to the float32 sums, and free them."""
        for group, has_gradients in zip(self._groups, self._optimizer.fp32_groups_has_gradients, strict=True):
            used = [(total, parameter.grad.flatten()) for parameter, total in group if parameter.grad is not None]
            if not any(has_gradients):
                _foreach_copy_(*_columns(used))
            else:
                for some in _portions(used):
                    _add(*_columns(some))
            has_gradients[:] = [parameter.grad is not None for parameter, _ in group]
            for parameter, _ in group:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights, unless the norm of all gradients is not finite. The engine clears the sums afterwards."""
        optimizer = self._optimizer
        norm = self._norm()
        optimizer.overflow = not math.isfinite(norm)
        optimizer._global_grad_norm = math.inf if optimizer.overflow else norm
        if optimizer.overflow:
            return
        gradients = optimizer.fp32_groups_gradient_flat_partition
        if self._clip and (factor := self._clip / (norm + 1e-6)) < 1:
            for gradient in gradients:
                gradient.mul_(factor)
        for partition, gradient in zip(optimizer.fp32_groups_flat_partition, gradients, strict=True):
            partition.grad = gradient
        optimizer.optimizer.step()
        optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.update_lp_params()

    def _norm(self) -> float:
        if self._mesh.tensor.size == 1:
            return float(sum_of_squares(self._optimizer.fp32_groups_gradients_flat).sqrt())
        squares = sum_of_squares(counted_once(chain.from_iterable(self._groups), self._mesh))
        return float(all_reduce(squares, self._mesh.tensor).sqrt())


Sums = list[tuple[Tensor, Tensor]]
"""Pairs of a sum and the gradient to be added."""


def _columns(pairs: Sums) -> tuple[list[Tensor], list[Tensor]]:
    return [total for total, _ in pairs], [gradient for _, gradient in pairs]


def _portions(pairs: Sums) -> list[Sums]:
    """Consecutive gradients with up to CAST_ELEMENTS in all; a larger one is alone."""
    portions: list[Sums] = []
    elements = CAST_ELEMENTS
    for total, gradient in pairs:
        elements += len(gradient)
        if elements > CAST_ELEMENTS:
            portions, elements = [*portions, []], len(gradient)
        portions[-1].append((total, gradient))
    return portions


def _add(sums: list[Tensor], gradients: list[Tensor]) -> None:
    """One launch would be needed for each pair of data types, so several gradients are cast together first."""
    if len(sums) == 1:
        sums[0].add_(gradients[0])
        return
    lengths = [len(gradient) for gradient in gradients]
    cast = sums[0].new_empty(sum(lengths)).split(lengths)
    _foreach_copy_(list(cast), gradients)
    _foreach_add_(sums, list(cast))
