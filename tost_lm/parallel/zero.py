"""DeepSpeed ZeRO: our settings to its own, and whole weights and optimizer state by name, whatever the mix of ranks."""

import contextlib
import io
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tost_lm.parallel.config import ParallelConfig
from tost_lm.parallel.mesh import FlatMpu, Mesh
from tost_lm.parallel.part import part_of

Moments = Iterator[tuple[str, str, Tensor]]


def build_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    parallel: ParallelConfig,
    *,
    micro_batch_sequences: int,
    accumulation: int,
    grad_clip: float,
    bfloat16: bool,
) -> Any:
    """A DeepSpeed engine around this rank's part of a model that is on its device already.

    `engine.backward` averages over micro-batches and over data × sequence ranks, so a rank's loss is the sum over its
    labelled tokens · micro-batches · ranks / labelled tokens of the global batch. In bfloat16 the gradients are summed
    and sent as float32. `engine.get_global_grad_norm()` is of the last step, before clipping.
    """
    deepspeed = _import_deepspeed(mesh.device.type)
    stage = parallel.zero_stage
    config = {
        "train_micro_batch_size_per_gpu": micro_batch_sequences,
        "gradient_accumulation_steps": accumulation,
        # DeepSpeed's own default is 1.0, not off. Stage 0 tells no norm unless it clips.
        "gradient_clipping": grad_clip or (math.inf if stage == 0 else 0.0),
        "zero_optimization": {"stage": stage, **_offload(parallel)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": 2**62,
    }
    mpu = FlatMpu(mesh) if mesh.tensor.group is not None else None
    with contextlib.redirect_stdout(io.StringIO()):  # memory reports of the bf16 optimizer
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    engine.mesh = mesh
    engine.clip_fp32_gradients = lambda: _clip_and_tell_norm(engine)
    engine.updates = Updates(engine)
    return engine


class Updates:
    """The optimizer's updates, each of which may be called off once the global gradient norm is known."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._inner = _inner(engine)
        self._update, self._inner.step = self._inner.step, self._unless_called_off

    def take(self, allows: Callable[[float], bool]) -> float:
        """`engine.step()` after the last micro-batch, with no trace in weights and optimizer unless `allows(norm)`.

        Returns:
            The global gradient norm before clipping, the same on every rank; infinite where it is not finite: then
            the update is called off without asking.
        """
        self._allows, self._allowed = allows, None
        self._engine.step()
        # Stages 1 to 3 look for what is not finite themselves, and then do not come to the update.
        return math.inf if self._allowed is None else float(self._engine.get_global_grad_norm())

    def _unless_called_off(self, *arguments: Any, **options: Any) -> Any:
        if self._allowed is None:  # the first of several groups
            norm = float(self._engine.optimizer._global_grad_norm)
            self._allowed = math.isfinite(norm) and self._allows(norm)
        return self._update(*arguments, **options) if self._allowed else None


def full_weights(engine: Any, into: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, whole float32 tensor on the CPU) of every parameter, one at a time. All ranks call it to its end.

    With `into`, a rank's host tensors by name, those are filled; what has none there is passed over on this rank.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in engine.module.named_parameters():
        ours = parameter if _is_plain(engine) else safe_get_full_fp32_param(parameter)
        whole = _whole(ours, parameter, engine.mesh)
        if into is None or name in into:
            yield name, _on_host(whole, into[name] if into else None)


def full_moments(engine: Any, into: dict[str, Tensor] | None = None) -> Moments:
    """(parameter, statistic, whole tensor on the CPU) of the optimizer's state, one at a time; none before the first
    update. All ranks call it to its end, `into` tensors named statistic/parameter as `full_weights`."""
    from deepspeed.utils import safe_get_full_optimizer_state

    _link_state(engine)
    for name, parameter in engine.module.named_parameters():
        for key in _statistics(engine):
            if _is_plain(engine):
                ours = _inner(engine).state[parameter][key]
            else:
                ours = safe_get_full_optimizer_state(parameter, key)
            whole = _whole(ours, parameter, engine.mesh)
            if into is None or f"{key}/{name}" in into:
                yield name, key, _on_host(whole, into[f"{key}/{name}"] if into else None)


def own_state(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """(what, tensor) of what torch's optimizer works on here: weights, in stages 1 to 3 partitions of the master copy,
    and their statistics as far as a step or `restore` has made them. The memory itself, no copies."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    state = _inner(engine).state
    for index, partition in enumerate(_partitions(engine)):
        name = names.get(partition, f"master weights {index}")
        yield name, partition.detach()
        for key, value in state.get(partition, {}).items():
            if torch.is_tensor(value) and value.dim() > 0:
                yield f"{key} of {name}", value


def restore(engine: Any, weights: Mapping[str, Tensor], moments: Moments, step: int) -> None:
    """Put whole float32 weights and the optimizer's state after `step` updates into a fresh engine of any mix.

    The engine's model must hold these weights already.
    """
    inner = _inner(engine)
    for partition in _partitions(engine):
        # torch creates its state only in the first step.
        state = {key: torch.zeros_like(partition) for key in ("exp_avg", "exp_avg_sq")}
        count = torch.tensor(float(step), device=partition.device if inner.defaults.get("fused") else "cpu")
        inner.state[partition] = {"step": count, **state}
    _link_state(engine)
    parameters = dict(engine.module.named_parameters())
    for name, parameter in parameters.items():
        if not _is_plain(engine):  # the master copy, where the model's own is in bfloat16
            _set(parameter, _part(weights[name], parameter, engine.mesh), None)
    for name, key, tensor in moments:
        part = _part(tensor, parameters[name], engine.mesh)
        if _is_plain(engine):
            inner.state[parameters[name]][key].copy_(part)
        else:
            _set(parameters[name], part, key)


def _set(parameter: nn.Parameter, value: Tensor, statistic: str | None) -> None:
    """Put this rank's share of `value` into DeepSpeed's partition of the master weight or of a statistic of it."""
    from deepspeed import utils

    if not hasattr(parameter, "ds_id"):
        if statistic is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, statistic)
        return
    # Stage 3 fills partitions up to equal size, and takes only a value that needs no filling as a whole.
    size: int = parameter.ds_tensor.ds_numel  # pyright: ignore[reportAttributeAccessIssue]
    rank = parameter.ds_process_group.rank()  # pyright: ignore[reportAttributeAccessIssue]
    here = value.flatten()[rank * size : (rank + 1) * size]
    here = pad(here, (0, size - len(here)))
    if statistic is None:
        utils.safe_set_local_fp32_param(parameter, here)
    else:
        utils.safe_set_local_optimizer_state(parameter, here, statistic)


def _offload(parallel: ParallelConfig) -> dict[str, Any]:
    host = {"device": "cpu"}
    return {
        "none": {},
        "optimizer": {"offload_optimizer": host},
        "all": {"offload_optimizer": host, "offload_param": host},
    }[parallel.offload]


def _clip_and_tell_norm(engine: Any) -> None:
    """Stage 0 in float32, where DeepSpeed clips and keeps the norm to itself."""
    from deepspeed.runtime.utils import clip_grad_norm_

    norm = clip_grad_norm_(list(engine.module.parameters()), engine.gradient_clipping(), mpu=engine.mpu)
    engine.optimizer._global_grad_norm = float(norm)


def _inner(engine: Any) -> torch.optim.Optimizer:
    """torch's optimizer, whose parameters are DeepSpeed's partitions."""
    return engine.optimizer if _is_plain(engine) else engine.optimizer.optimizer


def _partitions(engine: Any) -> list[Tensor]:
    """The tensors that torch's optimizer works on."""
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):  # stage 3, which lends them to it one by one
        return engine.optimizer.fp32_partitioned_groups_flat
    return [p for group in _inner(engine).param_groups for p in group["params"]]


def _is_plain(engine: Any) -> bool:
    """Whether torch's optimizer works on the parameters themselves: stage 0 in float32."""
    return isinstance(engine.optimizer, torch.optim.Optimizer)


def _link_state(engine: Any) -> None:
    # In stages 1 and 2 DeepSpeed maps parameters to the optimizer's state once, after the first step of the FIRST
    # parameter group, when the others have none yet; so map again.
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _statistics(engine: Any) -> list[str]:
    state = _inner(engine).state[_partitions(engine)[0]]
    return [key for key, value in state.items() if torch.is_tensor(value) and value.dim() > 0]


def _whole(ours: Tensor | None, parameter: nn.Parameter, mesh: Mesh) -> Tensor:
    """From the parts of all tensor ranks; perhaps the memory that is trained on itself."""
    assert ours is not None
    part = part_of(parameter)
    return ours.detach() if part is None else part.whole(ours.detach().to(mesh.device), mesh.tensor)


def _on_host(whole: Tensor, target: Tensor | None) -> Tensor:
    return whole.to("cpu", copy=True) if target is None else target.copy_(whole)


def _part(whole: Tensor, parameter: nn.Parameter, mesh: Mesh) -> Tensor:
    part = part_of(parameter)
    return (whole if part is None else part.of(whole, mesh.tensor)).to(mesh.device)


def _import_deepspeed(device: str) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Only inference uses this op, and compiling it takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return deepspeed
