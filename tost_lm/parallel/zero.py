"""DeepSpeed ZeRO: our settings to its own, and optimizer state by parameter name, whatever the world size."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

Moments = Iterator[tuple[str, str, Tensor]]


def build_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    zero_stage: int,
    micro_batch_sequences: int,
    accumulation: int,
    grad_clip: float,
    bfloat16: bool,
) -> Any:
    """A DeepSpeed engine around a model that is on its device already; the process group must exist.

    `engine.backward` averages over micro-batches and ranks, so each micro-batch's loss is a mean over equally many
    labelled tokens. In bfloat16 the gradients are summed and sent as float32.
    """
    deepspeed = _import_deepspeed(next(model.parameters()).device.type)
    config = {
        "train_micro_batch_size_per_gpu": micro_batch_sequences,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": grad_clip,  # DeepSpeed's own default is 1.0, not off
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": 2**62,
    }
    with contextlib.redirect_stdout(io.StringIO()):  # memory reports of the bf16 optimizer
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def full_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, whole float32 tensor on the CPU) of every parameter, one at a time. All ranks call it."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in engine.module.named_parameters():
        yield name, _on_cpu(safe_get_full_fp32_param(parameter))


def full_moments(engine: Any) -> Moments:
    """(parameter, statistic, whole tensor on the CPU) of the optimizer's state, one at a time. All ranks call it."""
    from deepspeed.utils import safe_get_full_optimizer_state

    _link_state(engine)
    for name, parameter in engine.module.named_parameters():
        for key in _statistics(engine):
            yield name, key, _on_cpu(safe_get_full_optimizer_state(parameter, key))


def restore(engine: Any, weights: dict[str, Tensor], moments: Moments, step: int) -> None:
    """Put float32 weights and the optimizer's state after `step` steps into a fresh engine, on any world size."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    inner = engine.optimizer.optimizer
    for partition in [p for group in inner.param_groups for p in group["params"]]:
        # torch creates its state only in the first step.
        state = {key: torch.zeros_like(partition) for key in ("exp_avg", "exp_avg_sq")}
        count = torch.tensor(float(step), device=partition.device if inner.defaults.get("fused") else "cpu")
        inner.state[partition] = {"step": count, **state}
    _link_state(engine)
    parameters = dict(engine.module.named_parameters())
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])  # what the model computes with; the master copy is set apart
        safe_set_full_fp32_param(parameter, weights[name].to(parameter.device))
    for name, key, tensor in moments:
        safe_set_full_optimizer_state(parameters[name], tensor.to(parameters[name].device), key)


def _link_state(engine: Any) -> None:
    # DeepSpeed maps parameters to the optimizer's state once, after the first step of the FIRST parameter group, when
    # the others have none yet; so map again.
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()


def _statistics(engine: Any) -> list[str]:
    state = next(iter(engine.optimizer.optimizer.state.values()), {})
    return [key for key, value in state.items() if torch.is_tensor(value) and value.dim() > 0]


def _on_cpu(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().to("cpu", copy=True)


def _import_deepspeed(device: str) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device)
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*", category=FutureWarning)
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Only inference uses this op, and compiling it takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return deepspeed
