"""All settings of a pre-training run. The modules of this package are the run: checkpoints, metrics and the loop."""

import math
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from tost_lm.checkpointing.format import Progress, read_model_config
from tost_lm.checkpointing.run_folder import find_checkpoint, step_of
from tost_lm.checkpointing.settings import CheckpointConfig
from tost_lm.config import NAMES_FILES, Section, require_local
from tost_lm.errors import ConfigError
from tost_lm.model.config import ModelConfig
from tost_lm.optim.interface import optimizer_of
from tost_lm.optim.settings import OptimConfig, obstacle_to_schedule, warmup_steps
from tost_lm.parallel.settings import LaunchConfig, ParallelConfig, obstacle_to_deepspeed, obstacle_to_tensor_ranks
from tost_lm.parallel.timeouts import Timeouts


class TrainingDataConfig(Section):
    """The training data, one shard folder or a mixture, and how samples are made of it."""

    exclusive: ClassVar = (("folder", "mixture"),)

    folder: Path | None = None
    """A shard folder written by `tost prepare shards`; it contains the tokenizer."""
    mixture: Annotated[dict[str, float] | None, NAMES_FILES] = None
    """Several shard folders with the same tokenizer and their weights: {"data/a/shards" = 3, "data/b/shards" = 1} takes three samples of a for each sample of b."""
    packing: Literal["concatenated", "best-fit"] = "concatenated"
    """`concatenated`: samples are cut from the concatenated documents, as published; `best-fit`: document packing: a sample contains whole documents that do not see each other, and a document longer than a sample is cut."""
    workers: int = Field(default=1, ge=0)
    """Loader processes of each rank that prefetch batches (0: none). The batches do not depend on it."""

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

    @property
    def folders(self) -> dict[Path, float]:
        """The shard folders and their weights."""
        if self.folder is not None:
            return {self.folder: 1.0}
        return {Path(folder): weight for folder, weight in (self.mixture or {}).items()}


class TrainConfig(Section):
    """Length of training, and sizes of its batches."""

    exclusive: ClassVar = (("steps", "tokens"), ("global_batch_size", "batch_tokens"))

    steps: int = Field(gt=0, le=2**40)
    """Optimizer steps, of a branch with those before it. A resumed run may have more or fewer if the learning rates of its steps so far stay as they were: schedule `constant`, or `wsd` before its decay."""
    tokens: int | None = Field(default=None, gt=0, exclude=True)
    """In place of train.steps: tokens of these steps, for example 7e9, rounded up to whole steps."""
    global_batch_size: int = Field(gt=0)
    """Sequences per optimizer step, over all ranks and micro-batches."""
    batch_tokens: int | None = Field(default=None, gt=0, exclude=True)
    """In place of train.global_batch_size: tokens per optimizer step, a multiple of train.seq_len."""
    micro_batch_size: int = Field(gt=0)
    """Sequences that a rank processes at once; gradient accumulation does the rest of its batch."""
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
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights and of the data order."""
    initial_weights: Path | None = None
    """Start from the weights of this run folder (its newest valid checkpoint), step folder or export, with a new optimizer and schedule. Without [model] the model is that of the weights, else both must be equal except in model.softmax.rope_theta. Unset: weights are drawn at random."""
    branch_from: Path | None = None
    """Branch: continue the run of this step folder in a run folder of its own, with its optimizer state and at its step of the schedule. [data], train.steps and what follows the stable phase of the schedule may differ. With the same data, training continues with the next batch; other data starts at its beginning. Also continues converted checkpoints of the released code."""
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
        if batch_tokens := _whole_number(given, "batch_tokens"):
            given["global_batch_size"], rest = divmod(batch_tokens, seq_len)
            if rest:
                nearest = max(round(batch_tokens / seq_len), 1) * seq_len
                raise ValueError(
                    f"train.batch_tokens {batch_tokens} is not a multiple of train.seq_len {seq_len}: set "
                    f"train.batch_tokens={nearest}"
                )
        if tokens := _whole_number(given, "tokens"):
            given["steps"] = -(-tokens // (positive(given.get("global_batch_size")) * seq_len))
        return given

    @model_validator(mode="after")
    def _one_beginning(self) -> "TrainConfig":
        if self.branch_from and self.initial_weights:
            raise ValueError("train.branch_from and train.initial_weights exclude each other: set one of them")
        return self


def _whole_number(given: dict[str, Any], name: str) -> int | None:
    """Remove a setting of [train] and return it; TOML has 7e9 as a float. Raises ValueError for other values."""
    value = given.pop(name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0 or value % 1:
        raise ValueError(f"train.{name} {value!r}: not a whole number above 0; write it as 7000000000 or 7e9")
    return int(value)


class MemoryConfig(Section):
    """Memory of a rank, and what it computes again to save memory; nothing here changes the result of training."""

    tile_tokens: Annotated[int, Field(gt=0)] | Literal["auto"] | None = None
    """Train tile by tile through all layers, exactly: number of tokens of each row in memory at once, over all sequence ranks. `auto`: as many as free memory allows. Without it whole rows."""
    offload_tile_states: bool = False
    """Keep the states between tiles in host memory. An A layer has a window of keys and values for each tile."""
    activation_checkpointing: Literal["none", "mixers", "full"] = "none"
    """`full`: store only the input of each block, and what it received from other ranks, and compute the block again in the backward: a third more matrix products. `mixers`: the same with the branch of the token mixer; for MLPs see mlp_tile_tokens."""
    activation_checkpointing_every: int = Field(default=1, gt=0)
    """Only every n-th block, from the first on; the others store all."""
    mlp_tile_tokens: int | None = Field(default=None, gt=0)
    """Compute the MLP of each block in tiles of this many tokens of a row, each again in the backward: activations of its hidden channels exist for one tile only. Without it whole rows are stored."""

    @model_validator(mode="after")
    def _every_block_of_a_kind(self) -> "MemoryConfig":
        if self.activation_checkpointing_every > 1 and self.activation_checkpointing == "none":
            raise ValueError(
                f"memory.activation_checkpointing_every {self.activation_checkpointing_every} has no effect with "
                "memory.activation_checkpointing none: set full or mixers"
            )
        return self


class ValidationConfig(Section):
    """The loss on held-out documents during training; nothing here changes the result of training."""

    every: int | None = Field(default=None, gt=0)
    """Steps between validations; without it there are none."""
    sequences: int = Field(default=64, gt=0)
    """Number of sequences of train.seq_len tokens, the same each time, over all ranks; at most one pass over the held-out split."""
    stop_after: int | None = Field(default=None, gt=0)
    """End the run after this many validations in a row whose loss was not below the lowest one before. Its checkpoint stays."""

    @model_validator(mode="after")
    def _stops_after_validations(self) -> "ValidationConfig":
        if self.stop_after and self.every is None:
            raise ValueError("validation.stop_after has no effect without validations: set validation.every")
        return self


class EvaluationConfig(Section):
    """Tasks during training, by the code of `tost eval`; nothing here changes the result of training."""

    every: int | None = Field(default=None, gt=0)
    """Steps between evaluations; another follows the last step. Without it there are none."""
    tasks: list[str] = Field(default_factory=list)
    """Names of tasks, families or groups of `tost eval`, all but heldout@bpb."""
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Sections of `tost eval`: [evaluation.settings.needle] has the settings of its section `needle`."""
    sets: dict[str, Path] = Field(default_factory=dict)
    """The file of each test set, as in `sets` of `tost eval`: {wikitext2 = "wiki.test.raw"}. Others are downloaded."""

    @model_validator(mode="after")
    def _when_and_what(self) -> "EvaluationConfig":
        if self.every and not self.tasks:
            raise ValueError("evaluation.every is set without evaluation.tasks: name tasks, or remove it")
        if self.tasks and not self.every:
            raise ValueError(
                "evaluation.tasks is set without evaluation.every: set the number of steps between evaluations"
            )
        return self


class WandbConfig(Section):
    """Where wandb shows the run, in wandb's words."""

    project: str = Field(default="tost_lm", pattern=r"^[^/\\#?%:]+$")
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project; default: WANDB_ENTITY, else that of wandb's login."""
    group: str | None = None
    """Group of runs; default: WANDB_RUN_GROUP, else none."""
    mode: Literal["online", "offline"] | None = None
    """Upload during the run, or write files for `wandb sync`; default: WANDB_MODE, else offline."""


class RunConfig(Section):
    """Where and how the run is executed. It may change between launches, because it does not affect the result."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run folder is runs/NAME, or FOLDER/NAME."""
    folder: Path = Path("runs")
    """Where the run folders are, for example on a shared file system."""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """Device; `auto` is the first of cuda, mps and cpu that is available."""
    log_every: int = Field(default=10, gt=0)
    """Steps between log lines and rows of metrics.jsonl."""
    loggers: list[Literal["wandb", "tensorboard"]] = Field(default=["wandb"])
    """Where the rows of the JSONL files are shown as well: wandb (not with WANDB_MODE=disabled, unless run.wandb.mode is set), TensorBoard."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    stop_at_step: int | None = Field(default=None, gt=0)
    """Save and stop after this step; a later launch resumes from it."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Save and stop before this many minutes have passed since the launch, for the time limit of a job; exit code 75."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Heartbeat timeout of the watchdog: a rank that takes longer for a step, or to write its shard of a checkpoint, counts as hung, and the run ends."""
    sdc_check_interval: int = Field(default=100, ge=0)
    """Detection of silent data corruption: steps between comparisons of all ranks' weights (parallel.zero_stage 0). At stages 1 to 3 checksums of the optimizer state are compared at every step. 0: neither."""
    abort_after_skips: int = Field(default=10, gt=0)
    """End the run after this many skipped steps in a row."""
    profile_steps: Annotated[tuple[int, int], Field(strict=False)] | None = None  # strictly, a list is no pair
    """First and last step, as in the log, to trace with torch.profiler: one file per rank in profile/."""
    on_config_change: Literal["refuse", "restart"] = "refuse"
    """Behaviour when the run folder has a run with other settings or shards: `refuse` prints the differences and exits; `restart` renames the old folder and starts again."""

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(self.timeout_seconds)

    @model_validator(mode="after")
    def _steps_in_order(self) -> "RunConfig":
        if self.profile_steps and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            raise ValueError(
                f"run.profile_steps {list(self.profile_steps)}: give the first and the last step, counted from 1"
            )
        return self


class PretrainConfig(Section):
    """Settings of `tost train`, from a file of `configs/pretrain/`."""

    model: ModelConfig
    data: TrainingDataConfig
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Settings of DeepSpeed, merged over those of the run: deepspeed.zero_optimization has sizes of buckets, prefetching and secondary partitions. What another setting decides, or what would change results, is rejected."""
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    run: RunConfig

    @model_validator(mode="before")
    @classmethod
    def _model_is_trained_on_sequences(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = _with_model_of_weights(values)
        model, train = (values.get(name) for name in ("model", "train"))
        if not isinstance(model, dict) or not isinstance(train, dict):
            return values
        lengths = [model.get("context_length", 0), train.get("seq_len")]
        if not all(isinstance(length, int) for length in lengths):
            return values  # reported as what it is
        return {**values, "model": {**model, "context_length": max(lengths)}}

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> "PretrainConfig":
        obstacles = chain(self._obstacles_of_model(), self._obstacles_of_compiler(), self._obstacles_of_tiles())
        if obstacle := next(filter(None, obstacles), None):
            raise ValueError(obstacle)
        return self

    def _obstacles_of_model(self) -> Iterator[str | None]:
        """Problems of the model and its optimizer with their batches and ranks; None: there is none of a kind."""
        limit = self.model.position_limit
        if limit is not None and self.train.seq_len > limit:
            yield (
                f"train.seq_len {self.train.seq_len} is longer than model.max_positions {limit}: "
                "raise model.max_positions or lower train.seq_len"
            )
        yield obstacle_to_schedule(self.optim, self.train.steps)
        yield obstacle_to_tensor_ranks(self.model, self.parallel.tensor)
        if self.train.dtype == "bfloat16" and self.parallel.zero_stage == 0:
            yield "parallel.zero_stage 0 has no float32 master weights for train.dtype bfloat16: set stage 1, 2 or 3"
        if self.train.seq_len < self.parallel.sequence:
            yield (
                f"train.seq_len {self.train.seq_len} is less than one token for each of parallel.sequence "
                f"{self.parallel.sequence} ranks: lower parallel.sequence"
            )
        yield obstacle_to_deepspeed(self.deepspeed)
        yield optimizer_of(self.optim).obstacle(self.parallel.tensor, self.parallel.zero_stage)

    def _obstacles_of_compiler(self) -> Iterator[str]:
        if not self.train.compile:
            return
        if self.parallel.tensor > 1 or self.parallel.zero_stage == 3:
            found = f"tensor {self.parallel.tensor}" if self.parallel.tensor > 1 else "zero_stage 3"
            yield (
                f"train.compile does not support parallel.{found}, whose communication is no part of a compiled graph: set "
                f"train.compile = false or parallel.{found.split()[0]} = 1"
            )
        if self.memory.activation_checkpointing == "mixers":
            yield (
                "train.compile compiles whole blocks, and memory.activation_checkpointing mixers computes a part of them "
                "again: set memory.activation_checkpointing = full or train.compile = false"
            )
        if self.memory.tile_tokens and self.model.kept_tokens is None:
            yield (
                "memory.tile_tokens: train.compile does not support layers whose state grows with the length, as softmax "
                "attention without a window: set train.compile = false or model.softmax.window"
            )

    def _obstacles_of_tiles(self) -> Iterator[str]:
        if self.parallel.zero_stage < 3:
            return
        tile, ranks = self.memory.mlp_tile_tokens, self.parallel.sequence
        fewest, most = self.row_tokens // ranks, -(-self.row_tokens // ranks)
        if tile and -(-fewest // tile) != -(-most // tile):
            yield (
                f"memory.mlp_tile_tokens {tile}: sequence ranks have {fewest} or {most} of {self.row_tokens} tokens, "
                "which are different numbers of tiles, and parallel.zero_stage 3 gathers weights for each tile: set "
                f"train.seq_len to a multiple of parallel.sequence {ranks}"
            )
        if self.memory.tile_tokens:
            yield (
                "memory.tile_tokens: parallel.zero_stage 3 would gather all weights again for each tile: set stage 0, 1 "
                "or 2"
            )

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @property
    def batch_tokens(self) -> int:
        return self.train.global_batch_size * self.train.seq_len

    @property
    def row_tokens(self) -> int:
        """Tokens of each row of a micro-batch; with best-fit packing all its sequences are one row."""
        packed = self.data.packing == "best-fit"
        return self.train.seq_len * (self.train.micro_batch_size if packed else 1)

    @property
    def tile_tokens(self) -> int:
        """Tokens of each row in memory at once, over all sequence ranks; memory.tile_tokens = auto counts as whole rows."""
        tile = self.memory.tile_tokens
        return min(self.row_tokens, tile) if isinstance(tile, int) else self.row_tokens

    @property
    def own_steps(self) -> int:
        """Steps of this run: of a branch, those after the step that its step folder is named after."""
        return self.train.steps - (step_of(self.train.branch_from or Path()) or 0)

    @property
    def last_step(self) -> int:
        """The last step of this launch."""
        return min(self.train.steps, self.run.stop_at_step or self.train.steps)

    def stops_early(self, progress: Progress) -> bool:
        """Whether `validation.stop_after` has ended the run."""
        return 0 < (self.validation.stop_after or 0) <= progress.validations_since_lowest

    def what_is_trained(self) -> "PretrainConfig":
        """The settings that identify a run; all others have default values."""
        carried_out = {
            "validation": ValidationConfig(),
            "evaluation": EvaluationConfig(),
            "launch": LaunchConfig(),
            "parallel": ParallelConfig(),
            "deepspeed": {},
            "memory": MemoryConfig(),
            "checkpoint": CheckpointConfig(),
            "run": RunConfig(name="any"),
        }
        data = self.data.model_copy(update={"workers": 1})
        optim = self.optim.model_copy(update={"warmup_steps": warmup_steps(self.optim, self.train.steps)})
        train = self.train.model_copy(update={"micro_batch_size": 1})
        # Initial weights may raise the context. Plugins are compared by the hashes of their texts.
        model = self.model.model_copy(update={"context_length": self.train.seq_len, "plugins": []})
        return self.model_copy(update={**carried_out, "model": model, "data": data, "optim": optim, "train": train})

    def with_context_of(self, weights: ModelConfig) -> "PretrainConfig":
        """The settings for a model that continues from these weights: it was trained on their context length, too."""
        longest = max(self.model.context_length, weights.context_length)
        return self.model_copy(update={"model": self.model.model_copy(update={"context_length": longest})})

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per rank and step. Raises ConfigError when the batch cannot be divided evenly over ranks."""
        batch, micro_batch = self.train.global_batch_size, self.train.micro_batch_size
        data_ranks = self.parallel.data_ranks(world_size)
        if batch % (data_ranks * micro_batch):
            raise ConfigError(
                f"train.global_batch_size {batch} is not divisible by {data_ranks} data ranks × train.micro_batch_size "
                f"{micro_batch} = {data_ranks * micro_batch}: set {self._even_batch(data_ranks)}"
            )
        return batch // (data_ranks * micro_batch)

    def _even_batch(self, data_ranks: int) -> str:
        """Settings nearest to these whose batch can be divided over ranks."""

        def settings(batch: int, ranks: int) -> str:
            largest = max(n for n in range(1, self.train.micro_batch_size + 1) if batch // ranks % n == 0)
            return f" train.micro_batch_size={largest}" if largest != self.train.micro_batch_size else ""

        batch = self.train.global_batch_size
        fewer = math.gcd(batch, data_ranks)
        more_sequence = (
            f"parallel.sequence={self.parallel.sequence * data_ranks // fewer}" if fewer < data_ranks else ""
        )
        unit = data_ranks if more_sequence else data_ranks * self.train.micro_batch_size
        larger = -(-batch // unit) * unit
        first = (more_sequence + settings(batch, fewer)).strip()
        return f"{first}, or train.global_batch_size={larger}{settings(larger, data_ranks)}"


def _with_model_of_weights(values: dict[str, Any]) -> dict[str, Any]:
    """Without [model], it is that of the weights that the run starts from. Raises CheckpointError if there are none."""
    train = values.get("train")
    name = "initial_weights" if isinstance(train, dict) and train.get("initial_weights") else "branch_from"
    path = train.get(name) if isinstance(train, dict) else None
    if "model" in values or not isinstance(path, str):
        return values
    require_local(f"train.{name}", path)
    folder = find_checkpoint(Path(path), verify=lambda _: None)  # verified when it is read
    return {**values, "model": read_model_config(folder).model_dump(mode="json", exclude={"plugins"})}
