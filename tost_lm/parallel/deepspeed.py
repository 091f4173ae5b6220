"""DeepSpeed's ZeRO as an engine, for pre-training of the size of GPT-2 on data and sequence ranks.

It uses DeepSpeed's documented calls, and these names, of which a new version may change any:

    deepspeed.ops.__compatible_ops__                    compilation of an operation that only inference uses
    optimizer._lazy_init_hp_params_optimizer_state      which state belongs to a parameter, at stages 1 and 2
    optimizer.fp32_partitioned_groups_flat              this rank's weights, at stage 3
"""

import contextlib
import io
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tost_lm.errors import TrainingError
from tost_lm.model.block import LMOutput
from tost_lm.model.lm import TostLM
from tost_lm.parallel.engine import Engine, StepSettings
from tost_lm.parallel.mesh import Mesh
from tost_lm.parallel.rank_weights import allocate
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.sizes import BUCKET_ELEMENTS


class DeepSpeedEngine(Engine):
    def __init__(self, engine: Any, mesh: Mesh) -> None:
        """`engine` is DeepSpeed's."""
        self._engine, self.mesh = engine, mesh
        self.module: TostLM = engine.module
        self.parameters = dict(self.module.named_parameters())
        self._stage: int = engine.zero_optimization_stage()
        self.optimizer: torch.optim.Optimizer = engine.basic_optimizer
        self.create_state(0)  # stages 1 and 2 map parameters to the state that exists in the first step
        if self._stage < 3:
            engine.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def replicated_part(self) -> int | None:
        return None

    def __call__(self, *arguments: Any, **options: Any) -> LMOutput:
        return self._engine(*arguments, **options)

    def set_training(self, training: bool) -> None:
        self._engine.train(training)

    def backward(self, roots: Sequence[Tensor], d_states: Sequence[Tensor] = (), *, ends_step: bool = True) -> None:
        [loss] = roots  # the settings refuse tiles
        self._engine.set_gradient_accumulation_boundary(ends_step)
        self._engine.backward(loss)

    def update(self, lr: float, is_allowed: Callable[[float], bool]) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not self._engine.was_step_applied() or not math.isfinite(norm):
            return math.inf
        if not is_allowed(norm):
            raise TrainingError('DeepSpeed cannot skip an update: set parallel.engine = "fsdp" and resume')
        return norm

    def whole(self, name: str, statistic: str = "") -> Tensor | None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter, (_, partition) = self.parameters[name], self.updated()[0]
        if not statistic:
            return safe_get_full_fp32_param(parameter)
        has_updated = self.optimizer.state[partition]["step"]
        return safe_get_full_optimizer_state(parameter, statistic) if has_updated else None

    def updated(self) -> Sequence[tuple[str, Tensor]]:
        if self._stage == 3:  # passes them to torch's optimizer one at a time
            partitions = self._engine.optimizer.fp32_partitioned_groups_flat
        else:
            partitions = [partition for group in self.optimizer.param_groups for partition in group["params"]]
        return [(f"weights {index}", partition) for index, partition in enumerate(partitions)]

    @torch.no_grad()
    def set_state(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        import deepspeed
        from deepspeed import utils

        for label, value in tensors:
            statistic, _, name = label.rpartition("/")
            parameter, value = self.parameters[name], value.to(self.mesh.device)
            if not statistic:
                with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=self._stage == 3):
                    parameter.copy_(value)
            key = {"optim_state_key": statistic} if statistic else {}
            if self._stage == 3:
                set_local = utils.safe_set_local_optimizer_state if statistic else utils.safe_set_local_fp32_param
                set_local(parameter, self._partition(value), **key)
            else:
                set_full = utils.safe_set_full_optimizer_state if statistic else utils.safe_set_full_fp32_param
                set_full(parameter, value, **key)

    def _partition(self, value: Tensor) -> Tensor:
        """This rank's part of a parameter at stage 3, which pads parts to equal sizes."""
        ranks, size = self.mesh.replicas, -(-value.numel() // self.mesh.replicas.size)
        part = value.flatten()[ranks.rank * size : (ranks.rank + 1) * size]
        return pad(part, (0, size - len(part)))


def allocate_for_engine(model: nn.Module, mesh: Mesh, parallel: ParallelConfig, *, bfloat16: bool) -> None:
    """Give a model on the meta device the memory that `build_engine` needs; `set_state` sets the values afterwards."""
    # DeepSpeed copies weights into buffers of its own: without `shared` there would be two of each.
    allocate(model, mesh.device, torch.bfloat16 if bfloat16 else torch.float32, shared=True)


def build_engine(
    model: TostLM,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    parallel: ParallelConfig,
    settings: StepSettings,
) -> DeepSpeedEngine:
    """An engine around a model that is on its device, with values or without (`allocate`)."""
    deepspeed = _import_deepspeed(mesh.device.type)
    config = {
        "train_micro_batch_size_per_gpu": 1,  # which nothing uses here
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": settings.grad_clip,
        "zero_optimization": {
            "stage": parallel.zero_stage,
            "reduce_bucket_size": max(BUCKET_ELEMENTS, *(parameter.numel() for parameter in model.parameters())),
            "overlap_comm": True,
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": settings.bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": 2**62,
        "timers": {"throughput": {"enabled": False}},  # it synchronizes the device in each micro-batch
    }
    # Without axes, DeepSpeed would create a group of all ranks with torch's default timeout.
    axes = SimpleNamespace(
        get_model_parallel_rank=lambda: 0,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_group=lambda: None,
        get_data_parallel_rank=lambda: mesh.replicas.rank,
        get_data_parallel_world_size=lambda: mesh.replicas.size,
        get_data_parallel_group=lambda: mesh.replicas.group,
    )
    has_launcher = "LOCAL_RANK" in os.environ
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed needs it
    with contextlib.redirect_stdout(io.StringIO()):  # memory reports of the bf16 optimizer
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=axes)
    if not has_launcher:
        del os.environ["LOCAL_RANK"]  # other libraries would await ranks
    return DeepSpeedEngine(engine, mesh)


def _import_deepspeed(device: str) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its compilation takes minutes
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return deepspeed
