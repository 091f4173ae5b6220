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

    engine: Literal["fsdp", "deepspeed"] = "fsdp"
    """What divides the model over data × sequence ranks: `fsdp`, which is torch's `fully_shard`, or DeepSpeed, for pre-training of the size of GPT-2. Checkpoints of either resume under the other."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """ZeRO stage over data × sequence ranks: 1 partitions the optimizer state, 2 also gradients, 3 also weights, 0 nothing. With one such rank, there is nothing to partition: stage 0 runs."""
    shard_ranks: int | None = Field(default=None, gt=1)
    """Adjacent data × sequence ranks, those of a node for example, that ZeRO partitions over; other ranks have copies. Default: all of them, so that there is no copy."""
    offload: Literal["none", "optimizer"] = "none"
    """Keep this rank's float32 weights and optimizer state in host memory, at stages 2 and 3."""

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> "ParallelConfig":
        if self.offload != "none" and self.zero_stage < 2:
            raise ValueError(
                f"parallel.offload {self.offload!r} needs ZeRO stage 2 or higher: parallel.zero_stage {self.zero_stage}; "
                "set parallel.zero_stage = 2 or parallel.offload = 'none'"
            )
        if self.shard_ranks and self.zero_stage == 0:
            raise ValueError("parallel.shard_ranks: ZeRO stage 0 shards nothing; set parallel.zero_stage = 1, 2 or 3")
        if self.engine == "deepspeed":
            for name, value in {"tensor": 1, "shard_ranks": None, "offload": "none"}.items():
                if getattr(self, name) != value:
                    raise ValueError(only_with_fsdp(f"parallel.{name} {getattr(self, name)}"))
            if self.zero_stage == 0:
                raise ValueError(only_with_fsdp("parallel.zero_stage 0"))
        return self

    def partitioning_stage(self, replicas: int) -> int:
        """The ZeRO stage in effect. With one data × sequence rank there is nothing to partition: `fsdp` then updates the
        weights in place and saves the copies."""
        return 0 if replicas == 1 and self.offload == "none" else self.zero_stage

    def shards(self, replicas: int) -> int:
        """Ranks that ZeRO partitions over. Raises ConfigError if they do not divide the data × sequence ranks."""
        if replicas % (self.shard_ranks or 1):
            raise ConfigError(
                f"parallel.shard_ranks {self.shard_ranks} does not divide the {replicas} data × sequence ranks of this "
                "launch; set a divisor of them, or none"
            )
        return self.shard_ranks or replicas

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


def only_with_fsdp(setting: str) -> str:
    """The line that refuses a setting with DeepSpeed."""
    return f'{setting}: parallel.engine "deepspeed" does not support it; set parallel.engine = "fsdp"'


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
