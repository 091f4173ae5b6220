"""The sections of the settings of a pre-training run."""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tost_lm.config import TAKES_URLS, Section, is_from_user
from tost_lm.errors import ConfigError
from tost_lm.parallel.timeouts import Timeouts
from tost_lm.pretrain.loggers import check_loggers
from tost_lm.remote import as_path


def _in_order(steps: tuple[int, int]) -> tuple[int, int]:
    if not 1 <= steps[0] <= steps[1]:
        raise PydanticCustomError("steps", "give the first and the last step, counted from 1")
    return steps


StepRange = Annotated[tuple[int, int], Field(strict=False), AfterValidator(_in_order)]  # strictly, a list is no pair
"""First and last step, counted from 1."""


class TrainingDataConfig(Section):
    """The training data, one shard folder or a mixture, and how samples are made of it."""

    exclusive: ClassVar = (("folder", "mixture"),)

    folder: Annotated[Path | None, TAKES_URLS] = None
    """A shard folder written by `tost prepare shards`; it contains the tokenizer. It may be at a URL, as those of a mixture: s3://bucket/shards."""
    mixture: Annotated[dict[str, float] | None, TAKES_URLS] = None
    """Several shard folders with the same tokenizer and their weights: {"data/a/shards" = 3, "data/b/shards" = 1} takes three samples of a for each sample of b."""
    packing: Literal["concatenated", "best-fit"] = "concatenated"
    """`concatenated`: samples are cut from the concatenated documents, as published; `best-fit`: document packing: a sample contains whole documents that do not see each other, and a document longer than a sample is cut."""
    skip_steps: list[StepRange] = Field(default_factory=list)
    """Ranges of steps, first and last, whose batches are not trained on: [[101, 120]]. They count as steps, and the learning rates of all others stay. At a resume, steps after the checkpoint may be added."""
    workers: int = Field(default=1, ge=0)
    """Threads of each rank that read batches ahead (0: none). The batches do not depend on it."""

    @model_validator(mode="after")
    def _folder_or_mixture(self) -> "TrainingDataConfig":
        if (self.folder is None) == (self.mixture is None):
            found = "neither is" if self.folder is None else "both are"
            raise ValueError(f"exactly one of data.folder and data.mixture must be set, but {found}")
        seen = set()
        for folder, weight in (self.mixture or {}).items():
            if not weight > 0:
                raise ValueError(f"data.mixture: the weight of {folder} is {weight}; set one above 0")
            if os.path.normpath(folder) in seen:
                raise ValueError(f"data.mixture: {os.path.normpath(folder)} is listed twice; give it one weight")
            seen.add(os.path.normpath(folder))
        if self.mixture == {}:
            raise ValueError("data.mixture is empty; name a shard folder and its weight")
        return self

    def skips(self, step: int) -> bool:
        """Whether skip_steps has step number `step`, counted from 1."""
        return any(first <= step <= last for first, last in self.skip_steps)

    @property
    def folders(self) -> dict[Path, float]:
        """The shard folders and their weights."""
        if self.folder is not None:
            return {self.folder: 1.0}
        return {as_path(folder): weight for folder, weight in (self.mixture or {}).items()}


class TrainConfig(Section):
    """Length of training, and sizes of its batches."""

    exclusive: ClassVar = (
        ("steps", "tokens"), ("global_batch_size", "batch_tokens"), ("branch_from", "initial_weights"),
    )  # fmt: skip

    steps: int = Field(gt=0, le=2**40)
    """Optimizer steps, of a branch with those before it. A resumed run may have more or fewer if the learning rates of its steps so far stay as they were: schedule `constant`, or `wsd` before its decay."""
    tokens: int | None = Field(default=None, gt=0, exclude=True)
    """In place of train.steps: tokens of these steps, for example 7e9, rounded up to whole steps."""
    global_batch_size: int = Field(gt=0, le=2**22)
    """Sequences per optimizer step, over all ranks and micro-batches."""
    batch_tokens: int | None = Field(default=None, gt=0, exclude=True)
    """In place of train.global_batch_size: tokens per optimizer step, a multiple of train.seq_len."""
    micro_batch_size: int = Field(gt=0)
    """Sequences that a rank processes at once, or all of its batch if that has fewer; gradient accumulation does the rest."""
    seq_len: int = Field(gt=1)
    """Tokens per sequence; at most model.max_positions if the model has parameters per position."""
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the z-loss, which keeps the logits from drifting: the mean of log-sum-exp(logits)² over the labels is added to the loss. The logged loss, validation and evaluation exclude it. 1e-4 is usual."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights and activations. Statistics, losses, gradient sums and optimizer state are always float32."""
    tf32: bool = False
    """TensorFloat-32 in float32 matrix products on GPUs: faster, with 10 bits of mantissa in place of 23. The operator's statistics, scores and memberships are not matrix products. Without effect on a CPU."""
    deterministic: bool = False
    """On GPUs, use kernels that add in a fixed order, so that a resumed run equals an uninterrupted one bit for bit. Slower; not with D layers, whose kernels are chosen by their measured time. CPUs need no setting."""
    compile: bool = False
    """Compile the blocks with torch.compile: the work between matrix products becomes a few fused kernels. The first steps take about ten seconds for each graph. Not with tensor ranks or ZeRO stage 3."""
    attention: Literal["fa2", "fa3"] = "fa2"
    """Kernels of softmax attention on GPUs in bfloat16: `fa3` is Flash Attention 3, for Hopper GPUs, of the package flash-attn-3. Results differ by rounding."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights and of the data order."""
    initial_weights: Annotated[Path | None, TAKES_URLS] = None
    """Start from the weights of this run folder (its newest valid checkpoint), step folder or export, with a new optimizer and schedule. [model] without `layers` and `preset` changes the model of the weights, whose settings may differ in model.softmax.rope_* only. Unset: weights are drawn at random."""
    branch_from: Annotated[Path | None, TAKES_URLS] = None
    """Branch: continue the run of this step folder in a run folder of its own, with its optimizer state, as one more stage: see [[stages]]."""
    skip_spike_sigma: float | None = Field(default=None, gt=0)
    """Skip a step whose loss or gradient norm is this many standard deviations above the mean of the last 128 (6 is usual). Without it only non-finite steps are skipped."""

    @model_validator(mode="before")
    @classmethod
    def _tokens_as_steps(cls, values: Any) -> Any:
        """Replace tokens by steps and batch_tokens by global_batch_size, so that the resolved tree has these only."""
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        for pair in cls.exclusive:
            if given.keys() >= set(pair):
                raise ValueError(f"train.{pair[0]} and train.{pair[1]} exclude each other: set one of them")
        positive = lambda value: value if isinstance(value, int) and value > 0 else 1  # its field reports any other
        seq_len = positive(given.get("seq_len"))
        if batch_tokens := _whole_number(given.pop("batch_tokens", None), "train.batch_tokens"):
            given["global_batch_size"], rest = divmod(batch_tokens, seq_len)
            if rest:
                nearest = max(round(batch_tokens / seq_len), 1) * seq_len
                raise ValueError(
                    f"train.batch_tokens {batch_tokens} is not a multiple of train.seq_len {seq_len}: set "
                    f"train.batch_tokens={nearest}"
                )
        if tokens := _whole_number(given.pop("tokens", None), "train.tokens"):
            given["steps"] = -(-tokens // (positive(given.get("global_batch_size")) * seq_len))
        return given


def _whole_number(value: Any, name: str) -> int | None:
    """A number of tokens; TOML has 7e9 as a float. Raises ValueError, which names the setting, for other values."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0 or value % 1:
        raise ValueError(f"{name} {value!r}: not a whole number above 0; write it as 7000000000 or 7e9")
    return int(value)


class MemoryConfig(Section):
    """Memory of a rank, and what it computes again to save memory; nothing here changes the result of training."""

    tile_tokens: Annotated[int, Field(gt=0)] | Literal["auto"] | None = None
    """Train tile by tile through all layers, exactly: number of tokens of each row in memory at once, over all sequence ranks. `auto`: as many as free memory allows. Without it whole rows."""
    offload_tile_states: bool = False
    """Keep the states between tiles in host memory. An A layer has a window of keys and values for each tile."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """`full`: store only the input of each block, and what it received from other ranks, and compute the block again in the backward: a third more matrix products; for MLPs alone see mlp_tile_tokens."""
    mlp_tile_tokens: int = Field(default=0, ge=0)
    """Compute the MLP of each block in tiles of this many tokens of a row, each again in the backward: activations of its hidden channels exist for one tile only. 0: whole rows are stored."""


class ValidationConfig(Section):
    """The loss on held-out documents during training; nothing here changes the result of training."""

    interval: int | None = Field(default=None, gt=0)
    """Steps between validations; without it there are none."""
    sequences: int = Field(default=64, gt=0)
    """Number of sequences of train.seq_len tokens, the same each time, over all ranks; at most one pass over the held-out split."""


class EvaluationConfig(Section):
    """Tasks during training, by the code of `tost eval`; nothing here changes the result of training."""

    interval: int | None = Field(default=None, gt=0)
    """Steps between evaluations; another follows the last step. Without it there are none."""
    tasks: list[str] = Field(default_factory=list)
    """Names of tasks, families or groups of `tost eval`."""
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Sections of `tost eval`: [evaluation.settings.needle] has the settings of its section `needle`."""
    sets: dict[str, Path] = Field(default_factory=dict)
    """The file of each test set, as in `sets` of `tost eval`: {wikitext2 = "wiki.test.raw"}. Others are downloaded."""

    @model_validator(mode="after")
    def _when_and_what(self) -> "EvaluationConfig":
        if bool(self.interval) != bool(self.tasks):
            raise ValueError("evaluation.interval and evaluation.tasks belong together: set both or neither")
        return self


class RunConfig(Section):
    """Where and how the run is executed. It may change between launches, because it does not affect the result."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run folder is runs/NAME, or FOLDER/NAME."""
    folder: Path = Path("runs")
    """Where the run folders are, for example on a shared file system."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; `auto` is cuda if there is a GPU, else cpu."""
    log_interval: int = Field(default=10, gt=0)
    """Steps between log lines and rows of metrics.jsonl."""
    loggers: list[str] = Field(default=["wandb"])
    """Where the rows of the JSONL files are shown as well: wandb, whose own variables say how (WANDB_MODE: default offline; WANDB_PROJECT: default tost_lm), tensorboard, or a Python file with a logger of your own."""
    logger_settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of loggers of your own, by the names of their files without .py."""
    stop_at_step: int | None = Field(default=None, gt=0)
    """Save and stop after this step; a later launch resumes from it."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Save and stop before this many minutes have passed since the launch, for the time limit of a job; exit code 75."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Heartbeat timeout of the watchdog: a rank that takes longer for a micro-batch or one of its tiles, or to write its shard of a checkpoint, counts as hung, and the run ends."""
    sdc_check_interval: int = Field(default=100, ge=0)
    """Detection of silent data corruption: steps between comparisons of all ranks' weights (parallel.zero_stage 0). At stages 1 to 3 checksums of the optimizer state are compared at every step. 0: neither."""
    abort_after_skips: int = Field(default=10, gt=0)
    """End the run after this many skipped steps in a row."""
    profile_steps: StepRange | None = None
    """First and last step, as in the log, to trace with torch.profiler: one file per rank in profile/."""

    @model_validator(mode="after")
    def _loggers_exist(self, info: ValidationInfo) -> "RunConfig":
        if is_from_user(info):
            try:
                check_loggers(self.loggers, self.logger_settings)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return self

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(self.timeout_seconds)


class StageConfig(Section):
    """A later stage of a run: what it changes. All other settings stay as in the stage before it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Its name in the records."""
    from_step: int | None = Field(default=None, gt=0)
    """Steps of the run before it; unset: it follows the last step of the stage before it."""
    tokens: int | None = Field(default=None, gt=0)
    """Its tokens, for example 2e9, rounded up to whole steps; unset: it ends after train.steps."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Changes of [model] that keep the shapes of all parameters, such as softmax.rope_theta and softmax.rope_scaling."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Shards with the same tokenizer."""
    optim: dict[str, Any] = Field(default_factory=dict)
    """The schedule counts the steps of the stage; it has a warm-up only if optim.warmup_steps is given here."""
    train: dict[str, Any] = Field(default_factory=dict)
    """train.seq_len, batches, numbers and their precision; not the seed."""
    validation: dict[str, Any] = Field(default_factory=dict)
    """Changes of [validation]."""
    evaluation: dict[str, Any] = Field(default_factory=dict)
    """Changes of [evaluation]."""
    parallel: dict[str, Any] = Field(default_factory=dict)
    """Changes of [parallel]."""
    memory: dict[str, Any] = Field(default_factory=dict)
    """Changes of [memory]."""
    checkpoint: dict[str, Any] = Field(default_factory=dict)
    """Changes of [checkpoint]."""

    @field_validator("tokens", mode="before")
    @classmethod
    def _whole_tokens(cls, value: Any) -> int | None:
        return _whole_number(value, "stages.tokens")

    @model_validator(mode="after")
    def _of_one_run(self) -> "StageConfig":
        of_run = {"train": ("seed", "initial_weights", "branch_from"), "checkpoint": ("upload",)}
        for section, name in ((section, name) for section, names in of_run.items() for name in names):
            if name in getattr(self, section):
                raise ValueError(f"stage {self.name}: {section}.{name} is one for the whole run; remove it here")
        if "tokens" in self.train:
            raise ValueError(f"stage {self.name}: train.tokens: write tokens = …, the length of the stage")
        if "kind" in self.optim:
            raise ValueError(
                f"stage {self.name}: optim.kind: another optimizer has another state; start another run with "
                "train.initial_weights"
            )
        return self

    @property
    def changes(self) -> dict[str, Any]:
        """The sections that it changes."""
        return self.model_dump(mode="json", exclude={"name", "from_step", "tokens"}, exclude_defaults=True)
