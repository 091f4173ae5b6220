"""DeepSpeed ZeRO: the engine, and whole weights and optimizer state by name under any parallel layout.

DeepSpeed's private and undocumented names, of which a new version may change any. Beside this module, `zero_step.py`
uses others.

    groups._WORLD_GROUP, .mpu, ops.__compatible_ops__                            timeout and compilation at the start
    optimizer._hp_optimizer_states_linked, ._lazy_init_hp_params_optimizer_state state at stages 1 and 2
    optimizer.fp32_partitioned_groups_flat                                       partitions at stage 3
    parameter.ds_id, .ds_tensor, .ds_numel, .ds_process_group                    partitions at stage 3

Replaced in an engine:

    engine.clip_fp32_gradients                       `clip_and_record_norm`
    engine.enable_backward_allreduce                 off on a single rank, at stage 0 and in bfloat16 at stage 1
"""

import contextlib
import io
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from tost_lm.model.block import LMOutput
from tost_lm.model.lm import TostLM
from tost_lm.optim.interface import statistics_of
from tost_lm.parallel.mesh import Mesh, deepspeed_mpu
from tost_lm.parallel.rank_weights import allocate, draw_on_rank, slice_of
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.parallel.zero_step import (
    ShortStep,
    SkippableStep,
    clip_and_record_norm,
    torch_optimizer,
    updates_parameters,
)
from tost_lm.sizes import bucket_elements

Moments = Iterator[tuple[str, str, Tensor]]


class Engine:
    """A model that is divided over ranks, and its optimizer, in DeepSpeed. All ranks call its methods together.

    The average of gradients is over micro-batches and over data × sequence ranks. So a rank's loss must be the sum over
    its labelled tokens · micro-batches · ranks / labelled tokens of the global batch. In bfloat16, gradients are summed
    and sent as float32.
    """

    def __init__(self, engine: Any, mesh: Mesh) -> None:
        """`engine` is DeepSpeed's."""
        self._engine, self.mesh = engine, mesh
        self.module: TostLM = engine.module
        self._update = SkippableStep(engine)

    @property
    def has_replicas(self) -> bool:
        """Whether ranks have equal copies of all weights and of the optimizer's state."""
        return self._engine.zero_optimization_stage() == 0 and self.mesh.replicas.size > 1

    def __call__(self, *arguments: Any, **options: Any) -> LMOutput:
        """Call the model, whose weights are gathered at ZeRO stage 3."""
        return self._engine(*arguments, **options)

    @property
    def as_module(self) -> nn.Module:
        """The model; its calls gather weights as those of the engine."""
        return self._engine

    def set_training(self, training: bool) -> None:
        """Whether the next calls train."""
        self._engine.train(training)

    def backward(self, loss: Tensor) -> None:
        """The backward of a micro-batch, after the call that computed its loss."""
        self._engine.backward(loss)

    def end_micro_batch(self) -> None:
        """End each micro-batch of a step but the last."""
        self._engine.step()

    def update(self, lr: float, is_allowed: Callable[[float], bool]) -> float:
        """After the last micro-batch: update the weights with a learning rate, unless it is not allowed.

        Returns:
            As `SkippableStep`.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        return self._update(is_allowed)

    def full_weights(self, into: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, whole float32 tensor on the CPU) of every parameter, one at a time. All ranks must exhaust it.

        With `into`, host tensors by name, it copies into these and yields only them on this rank.
        """
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self.module.named_parameters():
            ours = parameter if updates_parameters(self._engine) else safe_get_full_fp32_param(parameter)
            whole = _whole(ours, parameter, self.mesh)
            if into is None or name in into:
                yield name, _on_host(whole, into[name] if into else None)

    def statistics(self) -> dict[str, tuple[str, ...]]:
        """Names of what the optimizer keeps of each parameter."""
        return {name: statistics_of(torch_optimizer(self._engine), p) for name, p in self.module.named_parameters()}

    def full_moments(self, into: dict[str, Tensor] | None = None) -> Moments:
        """(parameter, statistic, whole tensor on the CPU) of the optimizer state, one at a time; none before the first
        update. All ranks must exhaust it; `into` as in `full_weights`, named statistic/parameter."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_state()
        for name, parameter in self.module.named_parameters():
            for key in self._stored_statistics(parameter):
                if updates_parameters(self._engine):
                    ours = torch_optimizer(self._engine).state[parameter][key]
                else:
                    ours = safe_get_full_optimizer_state(parameter, key)
                whole = _whole(ours, parameter, self.mesh)
                if into is None or f"{key}/{name}" in into:
                    yield name, key, _on_host(whole, into[f"{key}/{name}"] if into else None)

    def own_state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of this rank's optimizer memory, not copied: weights (stages 1 to 3: partitions of the master
        copy) and, after a step or `restore`, their statistics."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        state = torch_optimizer(self._engine).state
        for index, partition in enumerate(self._partitions()):
            name = names.get(partition, f"master weights {index}")
            yield name, partition.detach()
            for key, value in state.get(partition, {}).items():
                if torch.is_tensor(value) and value.dim() > 0:
                    yield f"{key} of {name}", value

    def create_state(self, step: int) -> None:
        """The optimizer state of a new engine after `step` updates, with statistics of zeros."""
        inner = torch_optimizer(self._engine)
        for partition in self._partitions():
            # torch creates the state in its first step.
            state = {key: torch.zeros_like(partition) for key in statistics_of(inner, partition)}
            count = torch.tensor(float(step), device=partition.device)
            inner.state[partition] = {"step": count, **state}
        self._link_state()

    def set_state(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Set weights and optimizer state, one tensor at a time, under any parallel layout.

        Args:
            tensors: by parameter name the weight, or by statistic/name the optimizer's, after `create_state`: float32,
                the slice of this tensor rank.
        """
        for label, local in tensors:
            statistic, _, name = label.rpartition("/")
            parameter, local = self.module.get_parameter(name), local.to(self.mesh.device)
            if not statistic:
                self._set_weight(parameter, local)
            elif updates_parameters(self._engine):
                torch_optimizer(self._engine).state[parameter][statistic].copy_(local)
            else:
                _set(parameter, local, statistic)

    def draw_weights(self) -> None:
        """Draw the weights of a new engine, as `TostLM` does."""
        self.set_state(draw_on_rank(self.module, self.module.config, self.mesh.tensor))

    @torch.no_grad()
    def _set_weight(self, parameter: nn.Parameter, local: Tensor) -> None:
        if hasattr(parameter, "ds_id"):
            partition: Tensor = parameter.ds_tensor  # pyright: ignore[reportAttributeAccessIssue]
            partition.copy_(_own_partition(parameter, local))
        else:
            parameter.copy_(local)
        if not updates_parameters(self._engine):
            _set(parameter, local, None)

    def _partitions(self) -> list[Tensor]:
        """The tensors that torch's optimizer updates."""
        if hasattr(self._engine.optimizer, "fp32_partitioned_groups_flat"):  # stage 3 passes them to it one at a time
            return self._engine.optimizer.fp32_partitioned_groups_flat
        return [p for group in torch_optimizer(self._engine).param_groups for p in group["params"]]

    def _link_state(self) -> None:
        # Stages 1 and 2 map parameters to optimizer state once, after the first step of the FIRST parameter group, when
        # the other groups have no state yet; so map again.
        if hasattr(self._engine.optimizer, "_hp_optimizer_states_linked"):
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _stored_statistics(self, parameter: nn.Parameter) -> list[str]:
        partition = parameter if updates_parameters(self._engine) else self._partitions()[0]
        state = torch_optimizer(self._engine).state[partition]
        return [key for key, value in state.items() if torch.is_tensor(value) and value.dim() > 0]


def allocate_for_engine(model: nn.Module, mesh: Mesh, parallel: ParallelConfig, *, bfloat16: bool) -> None:
    """Give a model on the meta device the memory that `build_engine` needs; `set_state` sets the values afterwards."""
    # From stage 1 on, DeepSpeed copies weights into buffers of its own: without `shared` there would be two of each.
    stage = parallel.partitioning_stage(mesh.replicas.size, bfloat16=bfloat16)
    allocate(model, mesh.device, torch.bfloat16 if bfloat16 else torch.float32, shared=stage > 0)


def build_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    parallel: ParallelConfig,
    *,
    micro_batch_size: int,
    accumulation: int,
    grad_clip: float,
    bfloat16: bool,
) -> Engine:
    """An engine around a model after `parallelize` that is on its device, with values or without (`allocate`)."""
    deepspeed = _import_deepspeed(mesh.device.type)
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    stage = parallel.partitioning_stage(mesh.replicas.size, bfloat16=bfloat16)
    sizes = [parameter.numel() for parameter in model.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        # DeepSpeed's default is 1.0, not off. Stage 0 computes no norm without clipping.
        "gradient_clipping": grad_clip or (math.inf if stage == 0 else 0.0),
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket_elements(sum(sizes), max(sizes)),
            "overlap_comm": True,  # with the backward; stage 1 in bfloat16 cannot, and ignores it
            **_offload(parallel),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": 2**62,
        "timers": {"throughput": {"enabled": False}},  # it synchronizes the device in each micro-batch
    }
    mpu = None if mesh.replicas.group is dist.group.WORLD else deepspeed_mpu(mesh)
    with _local_rank(), contextlib.redirect_stdout(io.StringIO()):  # memory reports of the bf16 optimizer
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    if isinstance(engine.optimizer, BF16_Optimizer):
        ShortStep(engine, mesh)
    engine.clip_fp32_gradients = lambda: clip_and_record_norm(engine, mesh)
    # Otherwise stage 0, and stage 1 in bfloat16, would copy all gradients of a single rank. The other stages collect
    # gradients in this call.
    short = updates_parameters(engine) or isinstance(engine.optimizer, BF16_Optimizer)
    engine.enable_backward_allreduce = mesh.replicas.size > 1 or not short
    return Engine(engine, mesh)


def _set(parameter: nn.Parameter, value: Tensor, statistic: str | None) -> None:
    """Set this rank's partition of a float32 weight, or of its `statistic`, from `value`."""
    from deepspeed import utils

    set_weight, set_statistic = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
    if hasattr(parameter, "ds_id"):
        # Stage 3 pads partitions to equal size, and its setters of whole values do not support padding.
        set_weight, set_statistic = utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state
        value = _own_partition(parameter, value)
    if statistic is None:
        set_weight(parameter, value)
    else:
        set_statistic(parameter, value, statistic)


def _own_partition(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This rank's partition in stage 3."""
    size: int = parameter.ds_tensor.ds_numel  # pyright: ignore[reportAttributeAccessIssue]
    rank = parameter.ds_process_group.rank()  # pyright: ignore[reportAttributeAccessIssue]
    value = value.flatten()[rank * size : (rank + 1) * size]
    return pad(value, (0, size - len(value)))


def _offload(parallel: ParallelConfig) -> dict[str, Any]:
    host = {"device": "cpu"}
    return {
        "none": {},
        "optimizer": {"offload_optimizer": host},
        "all": {"offload_optimizer": host, "offload_param": host},
    }[parallel.offload]


def _whole(ours: Tensor | None, parameter: nn.Parameter, mesh: Mesh) -> Tensor:
    """Gathered over tensor ranks; may alias the memory that is trained on."""
    assert ours is not None
    tensor_slice = slice_of(parameter)
    return ours.detach() if tensor_slice is None else tensor_slice.gather(ours.detach().to(mesh.device), mesh.tensor)


def _on_host(whole: Tensor, target: Tensor | None) -> Tensor:
    return whole.to("cpu", copy=True) if target is None else target.copy_(whole)


@contextlib.contextmanager
def _local_rank() -> Iterator[None]:
    """Set LOCAL_RANK without a launcher, too: DeepSpeed needs it. If it stayed, other libraries would await ranks."""
    has_launcher = "LOCAL_RANK" in os.environ
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        yield
    finally:
        if not has_launcher:
            del os.environ["LOCAL_RANK"]


def _import_deepspeed(device: str) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import groups

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Only inference uses this op, and its compilation takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    groups._WORLD_GROUP = dist.group.WORLD  # DeepSpeed's clone of it would have torch's default timeout
    groups.mpu = None  # that of an earlier engine
    return deepspeed
