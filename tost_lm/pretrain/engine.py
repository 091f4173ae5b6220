"""The model with its optimizer in an engine, the writer of its checkpoints, and the kernels of this process."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import deterministic

from tost_lm.checkpointing.uploads import Uploads
from tost_lm.checkpointing.writer import CheckpointWriter, RunFiles
from tost_lm.config import to_toml
from tost_lm.errors import ConfigError, first_line
from tost_lm.interop.card import model_card
from tost_lm.mixers.registry import SPECS
from tost_lm.model.config import ModelConfig
from tost_lm.model.transforms import apply_activation_checkpointing, compile_blocks
from tost_lm.optim.interface import optimizer_of
from tost_lm.parallel.apply import checkpoint_context, parallelize
from tost_lm.parallel.engine import Engine, StepSettings
from tost_lm.parallel.mesh import Mesh
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.stage_run import StageRun
from tost_lm.pretrain.tiled import TiledLM


def prepare_process(config: PretrainConfig, device: torch.device) -> None:
    """Set precision, attention kernels and determinism of this process. Raises ConfigError."""
    set_matmul_precision(config.train.tf32, device)
    if config.train.attention == "fa3":
        use_flash_attention_3(device)
    if config.train.deterministic:
        use_deterministic_kernels(config.model, device)


def warn_of_slow_layers(engine: Engine, warn: Callable[[str], None]) -> None:
    """Warn of layers without their kernels."""
    blocks: Any = engine.module.blocks
    for reason in dict.fromkeys(block.mixer.missing_kernels() for block in blocks):
        if reason:
            warn(f"warning: layers of this model are slow here: {reason}")


def set_matmul_precision(tf32: bool, device: torch.device) -> None:
    """Set the precision of float32 matrix products in this process, whatever it was before."""
    # On a CPU "high" would change results, too, where the CPU has instructions for it.
    torch.set_float32_matmul_precision("high" if tf32 and device.type == "cuda" else "highest")


def use_flash_attention_3(device: torch.device) -> None:
    """Let torch's operators of flash attention call Flash Attention 3 in this process.

    Raises:
        ConfigError: the GPU, torch or the installation lacks it.
    """
    what, fix = "train.attention fa3", "or set train.attention=fa2"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise ConfigError(f"{what}: it has kernels for Hopper GPUs only, and this device is {name}; use one, {fix}")
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        raise ConfigError(f"{what}: torch {torch.__version__} cannot call it; install torch ≥ 2.13, {fix}")
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:  # ValueError: torch knows other kernels only
        raise ConfigError(f"{what}: {first_line(error)}; install flash-attn-3, {fix}") from None


def use_deterministic_kernels(model: ModelConfig, device: torch.device) -> None:
    """Let torch, cuBLAS and flash attention add in a fixed order in this process. Without effect on a CPU.

    The kernels of this package have no atomic additions, and none is chosen by its time. torch raises RuntimeError
    where an operation has no deterministic kernel.

    Raises:
        ConfigError: a mixer is not deterministic.
    """
    if device.type == "cpu":
        return
    for letter in dict.fromkeys(model.letters):
        if obstacle := SPECS[letter].obstacle_to_determinism:
            raise ConfigError(f"train.deterministic: {obstacle}; set it to false, or change model.pattern")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read before the first matrix product
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that was not written.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def engines_of(parallel: ParallelConfig):
    """The module of `parallel.engine`, with `allocate_for_engine` and `build_engine`; importing it takes long."""
    if parallel.engine == "deepspeed":
        from tost_lm.parallel import deepspeed

        return deepspeed
    from tost_lm.parallel import fsdp

    return fsdp


def build_training_engine(config: PretrainConfig, mesh: Mesh) -> Engine:
    """The model, sharded over ranks, with an optimizer. Its weights have no values (`Engine.set_state`)."""
    torch.manual_seed(config.train.seed)
    bfloat16 = config.train.dtype == "bfloat16"
    with torch.device("meta"):
        model = TiledLM(config.model)
    engines, parallel = engines_of(config.parallel), config.parallel
    parallelize(model, mesh, partial(engines.allocate_for_engine, mesh=mesh, parallel=parallel, bfloat16=bfloat16))
    model.z_loss = config.train.z_loss
    apply_activation_checkpointing(
        model,
        activation_checkpointing=config.memory.activation_checkpointing,
        mlp_tile_tokens=config.memory.mlp_tile_tokens,
        context_fn=checkpoint_context(mesh),
    )
    if config.train.compile:
        compile_blocks(model)
    return engines.build_engine(
        model,
        optimizer_of(config.optim).build(model, config.optim),
        mesh,
        parallel,
        StepSettings(config.accumulation(mesh.tensor.size * mesh.replicas.size), config.optim.grad_clip, bfloat16),
    )


def build_writer(
    engine: Engine, start: StageRun, first_step: int = 0, uploads: Uploads | None = None
) -> CheckpointWriter:
    """The writer of a run's checkpoints; all ranks call it together. The run starts after `first_step` steps.

    Raises:
        CheckpointError: the disk is too small for the run; on rank 0.
    """
    config = start.config
    card = partial(model_card, run=config.run_folder)
    files = RunFiles(config.run_folder, to_toml(start.run), start.corpora.tokenizer(), card, uploads)
    writer = CheckpointWriter(engine, files, config.checkpoint, config.run.timeouts)
    last = start.run.in_stages()[-1].config.last_step
    writer.require_disk_space(first_step, last, keeps_best=config.validation.interval is not None)
    return writer
