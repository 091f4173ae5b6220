"""Long-Range Arena (arXiv 2011.04006): encoders of several mixers, trained and tested on one task. The settings of
`tost eval lra`.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, ValidationError, model_validator

from tost_lm.config import Section
from tost_lm.extra.encoder.settings import EncoderConfig
from tost_lm.optim.settings import OptimConfig, obstacle_to_schedule

TaskName = Literal["listops", "text", "retrieval", "image", "pathfinder"]
PUBLISHED_TOKENS: dict[TaskName, int] = {
    "listops": 2000,
    "text": 4000,
    "retrieval": 4000,
    "image": 1024,
    "pathfinder": 1024,
}
BAG_OF_TOKENS = "N"


class LraDataConfig(Section):
    """The task and its files."""

    task: TaskName = "listops"
    """Task of the Long-Range Arena."""
    folder: Path | None = None
    """Folder of the task's files: basic_*.tsv (listops; generated if the folder does not exist), aclImdb (text), the folder of new_aan_pairs.*.tsv (retrieval), cifar-10-batches-bin (image), pathfinder32/curv_contour_length_14 (pathfinder); unset: data/lra/TASK."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Tokens of a document; longer ones are cut. Unset: as published, 2,000 for listops, 4,000 for text and retrieval, 1,024 for image and pathfinder."""

    @property
    def home(self) -> Path:
        return self.folder or Path("data/lra") / self.task

    @property
    def tokens(self) -> int:
        return self.max_tokens or PUBLISHED_TOKENS[self.task]


class ListOpsConfig(Section):
    """The generator of ListOps. The defaults are the published specification."""

    min_length: int = Field(default=500, ge=1)
    """Examples have more tokens than this."""
    max_length: int = Field(default=2000, gt=0)
    """Examples have fewer tokens than this."""
    max_depth: int = Field(default=10, ge=2)
    """Depth of the expressions; a digit has depth 1."""
    max_args: int = Field(default=10, ge=2)
    """Arguments of an operator."""
    train: int = Field(default=96_000, gt=0)
    """Training examples."""
    valid: int = Field(default=2000, gt=0)
    """Validation examples."""
    test: int = Field(default=2000, gt=1)
    """Test examples."""
    seed: int = Field(default=0, ge=0)
    """Seed of all examples."""

    @model_validator(mode="after")
    def _lengths_exist(self) -> "ListOpsConfig":
        if self.max_length - self.min_length < 2:
            raise ValueError(
                f"listops.max_length {self.max_length} leaves no length above listops.min_length {self.min_length}; raise it"
            )
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = min(self.max_length, 2 + self.max_args * longest)
        if longest <= self.min_length:
            raise ValueError(
                f"listops.min_length {self.min_length}: no expression of listops.max_depth {self.max_depth} and "
                f"listops.max_args {self.max_args} has more than {longest} tokens; lower it"
            )
        return self


class LraModelConfig(Section):
    """The encoders. They share these settings and their number of parameters."""

    layers: int = Field(gt=0)
    """Number of blocks; a multiple of each mixer's letters."""
    heads: int = Field(gt=0)
    """Number of heads of the mixers; must divide model.width."""
    width: int = Field(gt=0)
    """Channels of the residual stream (hidden size)."""


class LraTrainConfig(Section):
    """Length of the training."""

    steps: int = Field(gt=0)
    """Training steps of each model."""
    batch_size: int = Field(default=32, gt=0)
    """Examples per step."""


class LraPretrainConfig(Section):
    """Self-pretraining (arXiv 2310.02980): predict masked tokens of the task's own training documents."""

    steps: int = Field(default=1000, gt=0)
    """Steps before the training."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    masked_fraction: float = Field(default=0.15, gt=0, lt=1)
    """Probability of a token to be masked."""


class LraModelsConfig(Section):
    """The models to train. Each has its own result."""

    name: str = Field(default="lra", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Results are written to runs/NAME/eval/TASK@lra."""
    mixers: list[str] = Field(default=["T", "S", "A", "SSSA", "C", BAG_OF_TOKENS], min_length=1)
    """Patterns of the encoders, a letter each layer: T TSSA, S slot memory, A softmax attention, C convolution. N alone is the control, a bag of tokens: no mixer and no positions."""
    learning_rates: list[PositiveFloat] = Field(default=[3e-4, 1e-3, 3e-3], min_length=1)
    """Learning rates that are tried with the first seed. The best on the validation split is used with all seeds."""
    seeds: list[NonNegativeInt] = Field(default=[0, 1, 2], min_length=1)
    """Seeds of weights and of the order of examples."""
    pretraining: list[bool] = Field(default=[False, True], min_length=1)
    """Train without self-pretraining, with it, or both."""


class LraConfig(Section):
    """Settings of `tost eval lra`."""

    data: LraDataConfig = Field(default_factory=LraDataConfig)
    listops: ListOpsConfig = Field(default_factory=ListOpsConfig)
    model: LraModelConfig
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: LraTrainConfig
    pretraining: LraPretrainConfig = Field(default_factory=LraPretrainConfig)
    lra: LraModelsConfig = Field(default_factory=LraModelsConfig)

    def optim_at(self, lr: float) -> OptimConfig:
        return self.optim.model_copy(update={"lr": lr})

    @model_validator(mode="after")
    def _rates_and_steps_fit(self) -> "LraConfig":
        if "lr" in self.optim.model_fields_set:
            raise ValueError("optim.lr has no effect here; remove it, and set lra.learning_rates and pretraining.lr")
        lowest = min(*self.lra.learning_rates, self.pretraining.lr)
        if self.optim.min_lr > lowest:
            raise ValueError(f"optim.min_lr {self.optim.min_lr:g} is above a learning rate of {lowest:g}; lower it")
        for section, steps in (("train", self.train.steps), ("pretraining", self.pretraining.steps)):
            if obstacle := obstacle_to_schedule(self.optim, steps):
                raise ValueError(obstacle.replace("train.steps", f"{section}.steps"))
        return self

    @model_validator(mode="after")
    def _check_mixers(self) -> "LraConfig":
        for mixer in self.lra.mixers:
            try:
                EncoderConfig(pattern=mixer, classes=2, vocab_size=2, **self.model.model_dump())
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ").replace("model.pattern", "pattern")
                raise ValueError(f"lra.mixers: {mixer!r}: {message}") from None
        return self
