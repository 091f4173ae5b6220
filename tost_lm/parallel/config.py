"""Settings of how training is spread over ranks."""

from typing import Literal

from pydantic import Field, model_validator

from tost_lm.config import Section
from tost_lm.errors import ConfigError
from tost_lm.model.config import ModelConfig


class ParallelConfig(Section):
    """Ranks = tensor × sequence × data, in this order: tensor ranks are neighbours, best on one node."""

    tensor: int = Field(default=1, gt=0)
    """Ranks that share the heads, the MLP and the vocabulary of a model (Megatron's tensor parallel size, its sequence parallelism included)."""
    sequence: int = Field(default=1, gt=0)
    """Ranks that share the tokens of each sequence (Megatron's context parallel size)."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What DeepSpeed partitions over data × sequence ranks: 1 the optimizer's state, 2 the gradients too, 3 the weights too; 0 nothing (float32 only)."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What is kept in host memory: the optimizer's state (stages 2 and 3), with `all` the weights too (stage 3)."""

    @model_validator(mode="after")
    def _stage_can_offload(self) -> "ParallelConfig":
        least = {"none": 0, "optimizer": 2, "all": 3}[self.offload]
        if self.zero_stage < least:
            raise ValueError(
                f"parallel.offload {self.offload!r} needs parallel.zero_stage {least} or more, not {self.zero_stage}"
            )
        return self

    def data_ranks(self, world_size: int) -> int:
        """Ranks that read sequences of their own. Raises ConfigError when tensor × sequence does not divide the world."""
        model_ranks = self.tensor * self.sequence
        if world_size % model_ranks:
            fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise ConfigError(
                f"parallel.tensor {self.tensor} × parallel.sequence {self.sequence} = {model_ranks} does not divide the "
                f"{world_size} ranks of this launch: choose a product of {', '.join(map(str, fits))}, or launch a "
                f"multiple of {model_ranks} ranks"
            )
        return world_size // model_ranks


def obstacle_to_tensor_ranks(model: ModelConfig, ranks: int) -> str | None:
    """Why `ranks` tensor ranks cannot share the model evenly; None: they can."""
    if "G" in model.pattern and ranks > 1:
        return f"the G layers of model.pattern {model.pattern!r} are not shared by ranks: set parallel.tensor = 1"
    if model.heads % ranks:
        return f"model.heads {model.heads} cannot be shared by parallel.tensor {ranks} ranks: choose a divisor of the heads"
    if model.vocab_size % ranks:
        padded = -(-model.vocab_size // ranks) * ranks
        return (
            f"model.vocab_size {model.vocab_size} cannot be shared by parallel.tensor {ranks} ranks: pad it to {padded}"
        )
    return None
