"""Engines on torch alone: `ShardedEngine` on `fully_shard`, and `PlainEngine` without a wrapper.

The optimizer has the parameters that the model had before: their memory becomes this rank's float32 weights, and they
keep the marks that `fully_shard` would drop. The model gets others, which compute in float32 or bfloat16.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from tost_lm import sizes
from tost_lm.errors import ConfigError
from tost_lm.model.block import LMOutput
from tost_lm.model.lm import TostLM
from tost_lm.parallel.agreement import communication_device
from tost_lm.parallel.engine import Engine, StepSettings, counted_once, sum_of_squares
from tost_lm.parallel.mesh import Axis, Mesh, all_reduce
from tost_lm.parallel.rank_weights import allocate, replace_parameter, slice_of
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.sizes import buckets
from tost_lm.torch_internals import add_each, copy_each


class TorchEngine(Engine):
    """What both engines do alike, with the float32 weights, gradients and statistics of `parameters`."""

    def __init__(self, model: TostLM, optimizer: torch.optim.Optimizer, mesh: Mesh, settings: StepSettings) -> None:
        self.module, self.mesh, self.optimizer, self._settings = model, mesh, optimizer, settings
        self.parameters = dict(model.named_parameters())

    @abstractmethod
    def _collect(self) -> None:
        """Move the gradients of this step, averaged over data × sequence ranks, to `parameters`."""

    @abstractmethod
    def _publish(self) -> None:
        """Let the next call use the weights of `parameters`."""

    @abstractmethod
    def _gathered(self, parameter: nn.Parameter, ours: Tensor) -> Tensor:
        """A tensor like a parameter, gathered over data × sequence ranks."""

    @abstractmethod
    def _own(self, value: Tensor) -> Tensor:
        """What this rank keeps of the value of a parameter."""

    @property
    @abstractmethod
    def _norm_divisor(self) -> int:
        """Ranks among data × sequence ranks that have each gradient after `_collect`."""

    def set_training(self, training: bool) -> None:
        self.module.train(training)

    def backward(self, roots: Sequence[Tensor], d_states: Sequence[Tensor] = (), *, ends_step: bool = True) -> None:
        torch.autograd.backward(roots, [torch.full_like(roots[0], 1 / self._settings.accumulation), *d_states])

    def collect(self) -> None:
        """Reduce the gradients of this step, to those of `parameters`."""
        self._collect()
        replicated = [p.grad for p in self.parameters.values() if p.grad is not None and slice_of(p) is None]
        _sum_over(self.mesh.tensor, replicated)  # each rank's gradient covers its own tokens only

    def update(self, lr: float, is_allowed: Callable[[float], bool]) -> float:
        self.collect()
        used = [(p, p.grad) for p in self.parameters.values() if p.grad is not None]
        squares = sum_of_squares(counted_once(used, self.mesh)).to(self.mesh.device)
        total = all_reduce(all_reduce(squares, self.mesh.tensor), self.mesh.replicas) / self._norm_divisor
        if limit := self._settings.grad_clip:
            nn.utils.clip_grads_with_norm_([p for p, _ in used], limit, total.sqrt().float())
        norm = math.sqrt(float(total))
        if math.isfinite(norm) and is_allowed(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self._publish()
        self.optimizer.zero_grad()
        return norm if math.isfinite(norm) else math.inf

    def whole(self, name: str, statistic: str = "") -> Tensor | None:
        parameter = self.parameters[name]
        ours = self.optimizer.state.get(parameter, {}).get(statistic) if statistic else parameter.detach()
        return None if ours is None else self.gathered(parameter, ours)

    def updated(self) -> Sequence[tuple[str, Tensor]]:
        return [*self.parameters.items()]

    @torch.no_grad()
    def set_state(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for label, local in tensors:
            statistic, _, name = label.rpartition("/")
            parameter = self.parameters[name]
            (self.optimizer.state[parameter][statistic] if statistic else parameter).copy_(self._own(local))
        self._publish()

    def gathered(self, parameter: nn.Parameter, ours: Tensor) -> Tensor:
        """A tensor like a parameter, gathered over all ranks; may alias the memory that is trained on."""
        tensor_slice, whole = slice_of(parameter), self._gathered(parameter, ours)
        return whole if tensor_slice is None else tensor_slice.gather(whole.to(self.mesh.device), self.mesh.tensor)


class PlainEngine(TorchEngine):
    """Each rank has all weights and the optimizer's state: ZeRO stage 0, or a single data × sequence rank.

    In float32 the model's weights are those of `parameters`. In bfloat16 they are copies, and the gradients of each
    backward are added to float32 sums.
    """

    def __init__(self, model: TostLM, optimizer: torch.optim.Optimizer, mesh: Mesh, settings: StepSettings) -> None:
        super().__init__(model, optimizer, mesh, settings)
        for name, parameter in self.parameters.items():
            weight = parameter.detach()
            replace_parameter(model, name, nn.Parameter(weight.bfloat16() if settings.bfloat16 else weight))
        self._weights = list(zip(self.parameters.values(), model.parameters(), strict=True))

    @property
    def replicated_part(self) -> int | None:
        return 0 if self.mesh.replicas.size > 1 else None

    def __call__(self, *arguments: Any, **options: Any) -> LMOutput:
        return self.module(*arguments, **options)

    @torch.no_grad()
    def backward(self, roots: Sequence[Tensor], d_states: Sequence[Tensor] = (), *, ends_step: bool = True) -> None:
        super().backward(roots, d_states)
        if self._settings.bfloat16:
            self._add_gradients()

    def _add_gradients(self) -> None:
        """In few launches."""
        used = [(parameter, weight) for parameter, weight in self._weights if weight.grad is not None]
        for some in buckets(used, lambda pair: pair[0].numel(), sizes.BUCKET_ELEMENTS):
            gradients = [torch.empty_like(parameter) for parameter, _ in some]
            copy_each(gradients, [weight.grad for _, weight in some if weight.grad is not None])
            sums = [(p.grad, gradient) for (p, _), gradient in zip(some, gradients, strict=True) if p.grad is not None]
            if sums:
                add_each(*map(list, zip(*sums, strict=True)))
            for (parameter, weight), gradient in zip(some, gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad
                weight.grad = None

    def _collect(self) -> None:
        if not self._settings.bfloat16:
            for parameter, weight in self._weights:
                parameter.grad, weight.grad = weight.grad, None
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        _sum_over(self.mesh.replicas, gradients, divisor=self.mesh.replicas.size)

    @torch.no_grad()
    def _publish(self) -> None:
        if self._settings.bfloat16:
            parameters, weights = zip(*self._weights, strict=True)
            copy_each(list(weights), list(parameters))

    def _gathered(self, parameter: nn.Parameter, ours: Tensor) -> Tensor:
        return ours

    def _own(self, value: Tensor) -> Tensor:
        return value

    @property
    def _norm_divisor(self) -> int:
        return self.mesh.replicas.size


class ShardedEngine(TorchEngine):
    """ZeRO stages 1 to 3: each rank has a shard of each parameter's first dimension, its gradient and statistics.

    Weights are gathered for a step at stages 1 and 2, for the forward and for the backward of a bucket of blocks at
    stage 3. Gradients are reduced, in float32 or wider, during the last backward of a step (1) or each one (2, 3); with
    several copies of the shards, their sums over these during the last one.
    """

    def __init__(
        self,
        model: TostLM,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        settings: StepSettings,
        parallel: ParallelConfig,
    ) -> None:
        super().__init__(model, optimizer, mesh, settings)
        self._stage = parallel.zero_stage
        for name, parameter in self.parameters.items():
            if not parameter.dim():
                raise ConfigError(
                    f"parallel.zero_stage {self._stage} cannot shard {name}, which has no dimensions; give it the "
                    "shape [1] in its layer, or set parallel.zero_stage = 0"
                )
        self._root: Any = _Root(model)
        _shard(self._root, mesh, parallel, bfloat16=settings.bfloat16)
        self._shard_of: dict[nn.Parameter, Any] = dict(zip(self.parameters.values(), model.parameters(), strict=True))
        """The DTensor that has the memory of a parameter, and receives its gradient."""
        for parameter, shard in self._shard_of.items():
            parameter.data = shard.detach().to_local()

    @property
    def replicated_part(self) -> int | None:
        return self.mesh.shards.rank if self.mesh.copies.size > 1 else None

    def __call__(self, *arguments: Any, **options: Any) -> LMOutput:
        return self._root(_Call(arguments, options))

    def backward(self, roots: Sequence[Tensor], d_states: Sequence[Tensor] = (), *, ends_step: bool = True) -> None:
        self._root.set_requires_gradient_sync(ends_step or self._stage > 1)
        self._root.set_requires_all_reduce(ends_step)
        self._root.set_reshard_after_backward(ends_step or self._stage == 3)
        super().backward(roots, d_states)

    def _collect(self) -> None:
        for parameter, shard in self._shard_of.items():
            if shard.grad is not None:
                parameter.grad, shard.grad = shard.grad.to_local(), None

    def _publish(self) -> None:
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _gathered(self, parameter: nn.Parameter, ours: Tensor) -> Tensor:
        shard = self._shard_of[parameter]
        return DTensor.from_local(
            ours.to(self.mesh.device), shard.device_mesh, shard.placements, shape=shard.shape, stride=shard.stride()
        ).full_tensor()

    def _own(self, value: Tensor) -> Tensor:
        rank, rows = self.mesh.shards.rank, -(-len(value) // self.mesh.shards.size)
        return value[rank * rows : (rank + 1) * rows]

    @property
    def _norm_divisor(self) -> int:
        return self.mesh.copies.size


class _Call:
    """Arguments of the model. `fully_shard` looks into tuples: it would copy offsets of documents to the device."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.arguments, self.options = arguments, options


class _Root(nn.Module):
    def __init__(self, model: TostLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: _Call) -> LMOutput:
        return self.model(*call.arguments, **call.options)


def _shard(root: _Root, mesh: Mesh, parallel: ParallelConfig, *, bfloat16: bool) -> None:
    gathers_again = parallel.zero_stage == 3
    options: dict[str, Any] = {
        "mesh": _device_mesh(mesh),
        # Not the inputs, which would round float32 states, the residual stream and counts.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bfloat16 else None,
            reduce_dtype=torch.float32 if bfloat16 else None,
            cast_forward_inputs=False,
        ),
        "offload_policy": (
            OffloadPolicy() if parallel.offload == "none" else CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
        ),
    }
    size_of = lambda block: sum(parameter.numel() for parameter in block.parameters())
    blocks = buckets(root.model.blocks, size_of, sizes.BUCKET_ELEMENTS)
    if len(blocks) > 1 or gathers_again:
        for bucket in blocks:
            fully_shard(bucket, reshard_after_forward=gathers_again, **options)
    if gathers_again and not root.model.config.tied_head:
        fully_shard(root.model.embedding, reshard_after_forward=True, **options).set_unshard_in_backward(False)
        # Its backward follows at once.
        fully_shard(root.model.head, reshard_after_forward=False, **options)
        register_fsdp_forward_method(root.model.head, "logits")
    # Its weights are needed first and last; `logits` are computed after the call.
    fully_shard(root, reshard_after_forward=False, **options)


def _device_mesh(mesh: Mesh) -> DeviceMesh:
    if mesh.copies.size == 1:
        return DeviceMesh.from_group(mesh.shards.group, mesh.device.type)
    ranks = torch.arange(mesh.replicas.size).view(mesh.copies.size, -1) * mesh.tensor.size + mesh.tensor.rank
    groups, names = [mesh.copies.group, mesh.shards.group], ("copies", "shards")
    return DeviceMesh.from_group(groups, mesh.device.type, ranks, mesh_dim_names=names)


def _sum_over(axis: Axis, gradients: Sequence[Tensor], divisor: int = 1) -> None:
    """Sum gradients over the ranks of an axis and divide them, in place."""
    if axis.size == 1:
        return
    device = communication_device()
    for bucket in buckets(gradients, Tensor.numel, sizes.BUCKET_ELEMENTS):
        flat = torch.cat([gradient.flatten().to(device) for gradient in bucket])
        totals = all_reduce(flat, axis).div_(divisor).split([gradient.numel() for gradient in bucket])
        for gradient, total in zip(bucket, totals, strict=True):
            gradient.copy_(total.view_as(gradient))


def allocate_for_engine(model: nn.Module, mesh: Mesh, parallel: ParallelConfig, *, bfloat16: bool) -> None:
    """Give a model on the meta device the memory that `build_engine` needs; `set_state` sets the values afterwards."""
    # `fully_shard` copies weights into shards of its own: without `shared` there would be whole weights, too.
    allocate(model, mesh.device, torch.float32, shared=parallel.partitioning_stage(mesh.replicas.size) > 0)


def build_engine(
    model: TostLM,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    parallel: ParallelConfig,
    settings: StepSettings,
) -> TorchEngine:
    """An engine around a model after `parallelize` that is on its device, with values or without (`allocate`).

    Raises:
        ConfigError: a parameter cannot be sharded.
    """
    if parallel.partitioning_stage(mesh.replicas.size) == 0:
        return PlainEngine(model, optimizer, mesh, settings)
    return ShardedEngine(model, optimizer, mesh, settings, parallel)
