"""Settings of `eval.recall`, which trains the models that it tests."""

from pydantic import Field, NonNegativeInt, ValidationError, model_validator

from tost_lm.config import Section
from tost_lm.model.config import ModelConfig
from tost_lm.optim.config import OptimConfig


class MqarConfig(Section):
    """Protocol `mqar@zoology`."""

    pairs: int = Field(default=4, gt=0)
    """Keys of an example, each given with its value once and asked for once."""
    sequence_tokens: int = Field(default=64, gt=0)
    """Tokens of an example."""
    vocab_size: int = Field(default=256, gt=0)
    """Ids; the lower half are keys, the upper half values."""
    power: float = Field(default=0.01, ge=0, le=1)
    """A query stands in slot g after the pairs with a weight of g^(power − 1); 1: evenly in all."""
    examples: int = Field(default=1000, gt=1)
    """Held-out examples, on which trained models are tested; training draws its own."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all examples."""

    @property
    def slots(self) -> int:
        """Places for a query: the tokens after the pairs, two by two."""
        return (self.sequence_tokens - 2 * self.pairs) // 2

    @model_validator(mode="after")
    def _pairs_fit(self) -> "MqarConfig":
        if self.vocab_size % 2:
            raise ValueError(f"mqar.vocab_size {self.vocab_size} is odd: half of it are keys, half values")
        if self.pairs > self.vocab_size // 2:
            raise ValueError(
                f"mqar.pairs: {self.pairs} distinct keys need an mqar.vocab_size of {2 * self.pairs} or more"
            )
        if self.pairs > self.slots:
            raise ValueError(
                f"mqar.pairs: {self.pairs} need mqar.sequence_tokens of {4 * self.pairs} or more, two for each pair and "
                "two for its query"
            )
        return self


class RecallTrainConfig(Section):
    """How long `eval.recall` trains."""

    steps: int = Field(default=1000, gt=0)
    """Updates of a model."""
    batch_examples: int = Field(default=64, gt=0)
    """Examples of a step."""


class RecallModelsConfig(Section):
    """Which models `eval.recall` trains; they share all other settings, and a result is kept for each."""

    name: str = Field(default="mqar", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Results go to runs/NAME/eval/mqar@zoology."""
    patterns: list[str] = Field(default=["A", "TA", "AT", "T"], min_length=1)
    """In place of model.pattern."""
    seeds: list[NonNegativeInt] = Field(default=[0], min_length=1)
    """Each pattern is trained with each; a seed draws weights and training examples."""


class RecallConfig(Section):
    """What `eval.recall` reads."""

    model: ModelConfig
    mqar: MqarConfig = Field(default_factory=MqarConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: RecallTrainConfig = Field(default_factory=RecallTrainConfig)
    recall: RecallModelsConfig = Field(default_factory=RecallModelsConfig)

    def model_of(self, pattern: str) -> ModelConfig:
        return ModelConfig.model_validate({**self.model.model_dump(), "pattern": pattern})

    @model_validator(mode="after")
    def _models_fit(self) -> "RecallConfig":
        if self.model.vocab_size != self.mqar.vocab_size:
            raise ValueError(
                f"model.vocab_size {self.model.vocab_size} is not mqar.vocab_size {self.mqar.vocab_size}: make them equal"
            )
        for pattern in self.recall.patterns:
            try:
                limit = self.model_of(pattern).position_limit
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"recall.patterns {pattern!r}: {message}") from None
            if limit is not None and limit < self.mqar.sequence_tokens:
                raise ValueError(
                    f"mqar.sequence_tokens {self.mqar.sequence_tokens} pass the model's positions "
                    f"(model.max_positions = {limit})"
                )
        return self
