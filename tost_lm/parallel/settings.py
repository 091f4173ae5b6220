"""Settings of the launcher and of parallel layouts, and obstacles to a layout."""

from typing import Literal

from pydantic import Field, model_validator

from tost_lm.config import Section
from tost_lm.errors import ConfigError
from tost_lm.model.config import ModelConfig


class LaunchConfig(Section):
    """How the ranks of one node are started. On several nodes, configs/cluster/launch.sh starts them."""

    ranks: int | None = Field(default=None, gt=0)
    """Ranks to start on this node; default: one per GPU, without GPUs launch.cpu_ranks. Under torchrun it is not needed."""
    cpu_ranks: int = Field(default=1, gt=0)
    """Ranks on CPUs without launch.ranks, in whole copies of the model: at least parallel.tensor × parallel.sequence."""


class LayoutConfig(Section):
    """Ranks that hold one copy of the model."""

    tensor: int = Field(default=1, gt=0)
    """Tensor ranks, which split heads, MLP and vocabulary. Megatron's own "sequence parallelism" between them is always on."""
    sequence: int = Field(default=1, gt=0)
    """Sequence ranks, which split the tokens of each sequence. Megatron and torchtitan call this context parallelism."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.sequence


class ParallelConfig(LayoutConfig):
    """World size = tensor × sequence × data. Tensor ranks are adjacent; keep them on one node."""

    engine: Literal["deepspeed", "fsdp"] = "deepspeed"
    """What divides the model over data × sequence ranks: DeepSpeed, or `fsdp`, which is torch's `fully_shard`. Checkpoints of either resume under the other."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """ZeRO stage over data × sequence ranks: 1 partitions the optimizer state, 2 also gradients, 3 also weights, 0 nothing (float32 only). With one such rank in float32, there is nothing to partition: stage 0 runs."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Offload to host memory: the optimizer state (stages 2 and 3), or with `all` also the weights (stage 3)."""

    @model_validator(mode="after")
    def _stage_can_offload(self) -> "ParallelConfig":
        least = {"none": 0, "optimizer": 2, "all": 3}[self.offload]
        if self.zero_stage < least:
            raise ValueError(
                f"parallel.offload {self.offload!r} needs ZeRO stage {least} or higher: parallel.zero_stage {self.zero_stage}; "
                f"set parallel.zero_stage = {least} or parallel.offload = 'none'"
            )
        return self

    def partitioning_stage(self, replicas: int, *, bfloat16: bool) -> int:
        """The ZeRO stage to run. With one data × sequence rank there is nothing to partition: in float32, stage 0 then
        updates the weights in place and saves the copies."""
        return 0 if replicas == 1 and not bfloat16 and self.offload == "none" else self.zero_stage

    def data_ranks(self, world_size: int) -> int:
        """Number of data ranks. Raises ConfigError if tensor × sequence does not divide the world size."""
        model_ranks = self.model_ranks
        if world_size % model_ranks:
            divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise ConfigError(
                f"parallel.tensor {self.tensor} × parallel.sequence {self.sequence} = {model_ranks} does not divide the "
                f"{world_size} ranks of this launch; choose a product of {', '.join(map(str, divisors))} or launch a "
                f"multiple of {model_ranks} ranks"
            )
        return world_size // model_ranks


def obstacle_to_tensor_ranks(model: ModelConfig, ranks: int) -> str | None:
    """Why `ranks` tensor ranks cannot split the model; None: they can."""
    if model.heads % ranks:
        return f"model.heads {model.heads} is not divisible by parallel.tensor {ranks}; choose a divisor of the heads"
    for spec, shape in model.mixers:
        if obstacle := spec.obstacle_to_tensor_ranks(shape, ranks):
            return obstacle
    if model.mlp_width % ranks:
        return (
            f"the {model.mlp_width} hidden channels of model.mlp {model.mlp!r} are not divisible by parallel.tensor {ranks}; "
            "choose a divisor of them"
        )
    if model.vocab_size % ranks:
        padded = -(-model.vocab_size // ranks) * ranks
        return f"model.vocab_size {model.vocab_size} is not divisible by parallel.tensor {ranks}; pad it to {padded}"
    return None
