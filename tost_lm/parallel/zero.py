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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from tost_lm.model.block import LMOutput
from tost_lm.model.lm import TostLM
from tost_lm.optim.interface import statistics_of
from tost_lm.parallel.engine import Engine, Moments, on_host, whole_tensor
from tost_lm.parallel.mesh import Mesh, deepspeed_mpu
from tost_lm.parallel.rank_weights import allocate
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.parallel.zero_step import (
    ShortStep,
    SkippableStep,
    clip_and_record_norm,
    torch_optimizer,
    updates_parameters,
)
from tost_lm.sizes import bucket_elements


class DeepSpeedEngine(Engine):
    drives_tiles = False  # stages 1 and 2 would lose gradients without an error

    def __init__(self, engine: Any, mesh: Mesh) -> None:
        """`engine` is DeepSpeed's."""
        self._engine, self.mesh = engine, mesh
        self.module: TostLM = engine.module
        self.parameters = dict(self.module.named_parameters())
        self._update = SkippableStep(engine)

    @property
    def has_replicas(self) -> bool:
        return self._engine.zero_optimization_stage() == 0 and self.mesh.replicas.size > 1

    def __call__(self, *arguments: Any, **options: Any) -> LMOutput:
        return self._engine(*arguments, **options)

    def set_training(self, training: bool) -> None:
        self._engine.train(training)

    def backward(
        self,
        loss: Tensor,
        states: Sequence[Tensor] = (),
        d_states: Sequence[Tensor] = (),
        *,
        ends_micro_batch: bool = True,
        ends_step: bool = True,
    ) -> None:
        assert ends_micro_batch
        assert not states
        self._engine.backward(loss)
        if not ends_step:
            self._engine.step()

    def update(self, lr: float, is_allowed: Callable[[float], bool]) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        return self._update(is_allowed)

    def full_weights(self, into: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self.module.named_parameters():
            ours = parameter if updates_parameters(self._engine) else safe_get_full_fp32_param(parameter)
            assert ours is not None
            whole = whole_tensor(ours, parameter, self.mesh)
            if into is None or name in into:
                yield name, on_host(whole, into[name] if into else None)

    def statistics(self) -> dict[str, tuple[str, ...]]:
        return {name: statistics_of(torch_optimizer(self._engine), p) for name, p in self.module.named_parameters()}

    def full_moments(self, into: dict[str, Tensor] | None = None) -> Moments:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_state()
        for name, parameter in self.module.named_parameters():
            for key in self._stored_statistics(parameter):
                if updates_parameters(self._engine):
                    ours = torch_optimizer(self._engine).state[parameter][key]
                else:
                    ours = safe_get_full_optimizer_state(parameter, key)
                assert ours is not None
                whole = whole_tensor(ours, parameter, self.mesh)
                if into is None or f"{key}/{name}" in into:
                    yield name, key, on_host(whole, into[f"{key}/{name}"] if into else None)

    def own_state(self) -> Iterator[tuple[str, Tensor]]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        state = torch_optimizer(self._engine).state
        for index, partition in enumerate(self._partitions()):
            name = names.get(partition, f"master weights {index}")
            yield name, partition.detach()
            for key, value in state.get(partition, {}).items():
                if torch.is_tensor(value) and value.dim() > 0:
                    yield f"{key} of {name}", value

    def create_state(self, step: int) -> None:
        inner = torch_optimizer(self._engine)
        for partition in self._partitions():
            # torch creates the state in its first step.
            state = {key: torch.zeros_like(partition) for key in statistics_of(inner, partition)}
            count = torch.tensor(float(step), device=partition.device)
            inner.state[partition] = {"step": count, **state}
        self._link_state()

    def set_state(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for label, local in tensors:
            statistic, _, name = label.rpartition("/")
            parameter, local = self.module.get_parameter(name), local.to(self.mesh.device)
            if not statistic:
                self._set_weight(parameter, local)
            elif updates_parameters(self._engine):
                torch_optimizer(self._engine).state[parameter][statistic].copy_(local)
            else:
                _set(parameter, local, statistic)

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
) -> DeepSpeedEngine:
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
    return DeepSpeedEngine(engine, mesh)


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
