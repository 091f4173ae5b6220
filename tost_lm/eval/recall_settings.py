"""Settings of `tost eval recall`."""

from pydantic import Field, NonNegativeInt, ValidationError, model_validator

from tost_lm.config import Section
from tost_lm.model.config import ModelConfig
from tost_lm.optim.settings import OptimConfig, obstacle_to_schedule


class MqarConfig(Section):
    """Protocol `mqar@zoology`."""

    pairs: int = Field(default=4, gt=0)
    """Keys per example. Each appears once with its value and once as a query."""
    seq_len: int = Field(default=64, gt=0)
    """Tokens per example."""
    vocab_size: int = Field(default=256, gt=0)
    """Size of the vocabulary; the lower half are keys, the upper half values."""
    power: float = Field(default=0.01, ge=0, le=1)
    """A query is drawn for slot g after the pairs with weight g^(power − 1); 1: uniform."""
    examples: int = Field(default=1000, gt=1)
    """Held-out examples for the test."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all examples."""

    @property
    def slots(self) -> int:
        """Slots of two tokens after the pairs; each can have a query."""
        return (self.seq_len - 2 * self.pairs) // 2

    @model_validator(mode="after")
    def _check_pairs(self) -> "MqarConfig":
        if self.vocab_size % 2:
            raise ValueError(f"mqar.vocab_size: {self.vocab_size} is odd; set an even size, half keys and half values")
        if self.pairs > self.vocab_size // 2:
            raise ValueError(
                f"mqar.pairs: {self.pairs} distinct keys do not fit; set mqar.vocab_size to {2 * self.pairs} or more"
            )
        if self.pairs > self.slots:
            raise ValueError(
                f"mqar.pairs: {self.pairs} pairs do not fit; set mqar.seq_len to {4 * self.pairs} or more, two tokens "
                "for each pair and two for its query"
            )
        return self


class RecallTrainConfig(Section):
    """Length of the training."""

    steps: int = Field(default=1000, gt=0)
    """Training steps of each model."""
    batch_size: int = Field(default=64, gt=0)
    """Examples per step."""


class RecallModelsConfig(Section):
    """The models to train. They share all other settings, and each has its own result."""

    name: str = Field(default="mqar", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Results are written to runs/NAME/eval/mqar@zoology."""
    patterns: list[str] = Field(default=["A", "TA", "AT", "T"], min_length=1)
    """Values of model.pattern."""
    seeds: list[NonNegativeInt] = Field(default=[0], min_length=1)
    """Seeds of weights and training examples; each pattern is trained with each seed."""


class RecallConfig(Section):
    """Settings of `tost eval recall`."""

    model: ModelConfig
    mqar: MqarConfig = Field(default_factory=MqarConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: RecallTrainConfig = Field(default_factory=RecallTrainConfig)
    recall: RecallModelsConfig = Field(default_factory=RecallModelsConfig)

    def model_of(self, pattern: str) -> ModelConfig:
        return ModelConfig.model_validate({**self.model.model_dump(), "pattern": pattern})

    @model_validator(mode="after")
    def _schedule_fits_steps(self) -> "RecallConfig":
        if obstacle := obstacle_to_schedule(self.optim, self.train.steps):
            raise ValueError(obstacle)
        return self

    @model_validator(mode="after")
    def _check_models(self) -> "RecallConfig":
        if self.model.vocab_size != self.mqar.vocab_size:
            raise ValueError(
                f"model.vocab_size: {self.model.vocab_size} is not mqar.vocab_size {self.mqar.vocab_size}; make them equal"
            )
        for pattern in self.recall.patterns:
            try:
                limit = self.model_of(pattern).position_limit
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"recall.patterns: {pattern!r}: {message}") from None
            if limit is not None and limit < self.mqar.seq_len:
                raise ValueError(
                    f"mqar.seq_len: {self.mqar.seq_len} exceeds the model's positions; set model.max_positions "
                    f"({limit}) to it or more"
                )
        return self
