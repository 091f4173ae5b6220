"""All settings of a pre-training run."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tost_lm.config import Section
from tost_lm.errors import ConfigError
from tost_lm.model.config import ModelConfig
from tost_lm.optim.config import OptimConfig
from tost_lm.parallel.config import ParallelConfig, obstacle_to_tensor_ranks


class TrainingDataConfig(Section):
    """What to train on, either one folder or a mixture, and how it becomes samples."""

    folder: Path | None = None
    """A shard folder written by data_prep.build_shards; its tokenizer travels with it."""
    mixture: dict[str, float] | None = None
    """Several such folders of one tokenizer, each with its weight: {"data/a/shards" = 3, "data/b/shards" = 1} takes three samples of a to one of b."""
    packing: Literal["concatenated", "best-fit"] = "concatenated"
    """`concatenated`: a sample is cut out of all documents one after another, as published; `best-fit`: it holds whole documents that do not see each other, and one longer than a sample is cut."""
    workers: int = Field(default=1, ge=0)
    """Processes of each rank that read ahead (0: the rank reads by itself); what is trained on does not depend on it."""

    @model_validator(mode="after")
    def _folder_or_mixture(self) -> "TrainingDataConfig":
        if (self.folder is None) == (self.mixture is None):
            there = "neither is there" if self.folder is None else "both are there"
            raise ValueError(f"data.folder or data.mixture must be set, one of them: {there}")
        seen = set()
        for folder, weight in (self.mixture or {}).items():
            if not weight > 0:
                raise ValueError(f"data.mixture: the weight of {folder} is {weight}; it must be more than 0")
            if os.path.normpath(folder) in seen:
                raise ValueError(f"data.mixture: {os.path.normpath(folder)} is there twice; give it one weight")
            seen.add(os.path.normpath(folder))
        if self.mixture == {}:
            raise ValueError("data.mixture: is empty; name a shard folder and its weight")
        return self

    @property
    def folders(self) -> dict[Path, float]:
        """The shard folders with their weights."""
        if self.folder is not None:
            return {self.folder: 1.0}
        return {Path(folder): weight for folder, weight in (self.mixture or {}).items()}


class TrainConfig(Section):
    """How much is trained, in which portions."""

    steps: int = Field(gt=0)
    """Optimizer steps."""
    batch_sequences: int = Field(gt=0)
    """Sequences of one step, over all ranks and micro-batches."""
    micro_batch_sequences: int = Field(gt=0)
    """Sequences that a rank holds at once; the rest of its share is accumulated."""
    sequence_tokens: int = Field(gt=1)
    """Tokens of a sequence; at most model.max_positions, where the model learns something for each position."""
    truncate_tokens: int | None = Field(default=None, gt=0)
    """Truncated back-propagation through time, an approximation: states go on through the whole row, gradients stop at every multiple of so many tokens, which are all that is held at once. Without it gradients are exact."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations; statistics, losses, gradient sums and the optimizer stay float32."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the initial weights and of the order of the data."""
    initial_weights: Path | None = None
    """Begin from the weights of this run folder (its newest valid checkpoint), step folder or export, with a fresh optimizer and schedule; their [model] must be this one. Without it they are drawn."""
    skip_spikes: float | None = Field(default=None, gt=0)
    """Skip a step whose loss or gradient norm lies this many standard deviations above the mean of the last 128 (6 is usual); without it only those that are not finite."""


class MemoryConfig(Section):
    """What a rank holds at once and what it computes again; nothing here changes what is trained."""

    tile_tokens: Annotated[int, Field(gt=0)] | Literal["auto"] | None = None
    """Train tile by tile through all layers, exactly: so many tokens of each row are held at once (over all sequence ranks), with the layers' states between tiles, whatever the length; auto: as many as free memory has room for; without it whole rows."""
    boundary_states: Literal["device", "host"] = "device"
    """Where the states between tiles wait; those of A layers, a window of keys and values each, may be many on a GPU."""
    recompute: Literal["nothing", "blocks"] = "nothing"
    """`blocks`: keep each block's input alone for the backward, and what it received from other sequence ranks, and compute the block again there: a third more work in products."""
    mlp_tokens: int | None = Field(default=None, gt=0)
    """Take the MLP of each block in portions of so many tokens of a row on a rank, each computed again in the backward: what is 4 times as wide as the model is held for one portion only; without it whole rows, held."""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept; nothing here changes what is trained."""

    every: int = Field(default=1000, gt=0)
    """Steps between checkpoints; the last step always leaves one."""
    keep: int = Field(default=3, gt=0)
    """How many of the newest are kept, besides the one with the lowest validation loss."""
    keep_every: int | None = Field(default=None, gt=0)
    """Those after a multiple of so many steps are kept for good."""
    asynchronous: bool = True
    """Write while training goes on, from a copy in host memory; else training waits."""


class ValidationConfig(Section):
    """The loss on held-out documents in the course of training; nothing here changes what is trained."""

    every: int | None = Field(default=None, gt=0)
    """Steps between measurements; without it there are none."""
    sequences: int = Field(default=64, gt=0)
    """How many sequences of train.sequence_tokens, the same each time, over all ranks and micro-batches."""


class EvaluationConfig(Section):
    """Test sets in the course of training, measured as eval.zero_shot measures them; nothing here changes what is trained."""

    every: int | None = Field(default=None, gt=0)
    """Steps between measurements, and there is one after the last step; without it there are none."""
    protocols: list[str] = Field(default_factory=list)
    """Those of eval.zero_shot, by name."""
    batch_tokens: int | None = Field(default=None, gt=0)
    """Tokens that a copy of the model reads at once; without it 8,192 on a GPU and 2,048 on a CPU. It changes memory and time, not the result."""
    sets: dict[str, Path] = Field(default_factory=dict)
    """The file of each test set, as sets of eval.zero_shot: {wikitext2 = "wiki.test.raw"}; one that is not given is fetched."""

    @model_validator(mode="after")
    def _when_and_what(self) -> "EvaluationConfig":
        if self.every and not self.protocols:
            raise ValueError(
                "evaluation.every: nothing is measured; name what in evaluation.protocols, or leave it out"
            )
        if self.protocols and not self.every:
            raise ValueError("evaluation.protocols: are never measured; say after how many steps in evaluation.every")
        return self


class RunConfig(Section):
    """Where and how the run is carried out; nothing here changes what is trained, so it may differ on resuming."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run folder is runs/NAME."""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """What to compute on; auto takes the first that is there."""
    log_every: int = Field(default=10, gt=0)
    """Steps between progress lines and rows of metrics.jsonl."""
    stop_step: int | None = Field(default=None, gt=0)
    """Leave with a checkpoint after this step; the same run goes on from there later."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Leave with a checkpoint before so many minutes are over since the launch, as for a job's limit; exit code 75."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """What a rank may take for a step, or for its part of a checkpoint, before it counts as hung, and the run ends."""
    check_every: int = Field(default=100, ge=0)
    """Steps between comparisons of all ranks' weights (parallel.zero_stage 0); at stages 1 to 3 the optimizer's state is summed after each step and before the next. 0: neither."""
    abort_after_skips: int = Field(default=10, gt=0)
    """End the run when so many steps in a row were skipped."""
    profile_steps: tuple[int, int] | None = None
    """Trace the steps from the one to the other, as the log counts them, with torch.profiler: a file for each rank in profile/."""
    if_changed: Literal["refuse", "restart"] = "refuse"
    """When the folder holds a run of other settings or shards: say so and exit, or set it aside and begin anew."""

    @model_validator(mode="after")
    def _steps_in_order(self) -> "RunConfig":
        if self.profile_steps and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            raise ValueError(
                f"run.profile_steps {list(self.profile_steps)}: give the first and the last step, from 1 on"
            )
        return self


class PretrainConfig(Section):
    """What `pretrain.train` reads from a file of `configs/pretrain/`."""

    model: ModelConfig
    data: TrainingDataConfig
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    run: RunConfig

    @model_validator(mode="after")
    def _sequence_fits_positions(self) -> "PretrainConfig":
        limit = self.model.position_limit
        if limit is not None and self.train.sequence_tokens > limit:
            raise ValueError(
                f"train.sequence_tokens {self.train.sequence_tokens} is longer than model.max_positions {limit}: "
                "raise the one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _model_fits_ranks(self) -> "PretrainConfig":
        if obstacle := obstacle_to_tensor_ranks(self.model, self.parallel.tensor):
            raise ValueError(obstacle)
        if "G" in self.model.pattern and self.parallel.sequence > 1:
            raise ValueError(
                f"the G layers of model.pattern {self.model.pattern!r} cannot share sequences out: set "
                "parallel.sequence = 1"
            )
        if self.train.dtype == "bfloat16" and self.parallel.zero_stage == 0:
            raise ValueError(
                "parallel.zero_stage 0 keeps no float32 weights beside train.dtype bfloat16: choose stage 1 to 3"
            )
        if self.train.sequence_tokens < self.parallel.sequence:
            raise ValueError(
                f"train.sequence_tokens {self.train.sequence_tokens} is less than a token for each of "
                f"parallel.sequence {self.parallel.sequence} ranks: lower the latter"
            )
        return self

    @model_validator(mode="after")
    def _portions_are_alike_on_ranks(self) -> "PretrainConfig":
        portion, ranks = self.memory.mlp_tokens, self.parallel.sequence
        if portion and self.parallel.zero_stage == 3:
            fewest, most = self.row_tokens // ranks, -(-self.row_tokens // ranks)
            if -(-fewest // portion) != -(-most // portion):
                raise ValueError(
                    f"memory.mlp_tokens {portion}: of {self.row_tokens} tokens in a row some of parallel.sequence {ranks} "
                    f"ranks have {fewest}, others {most}, which make other numbers of portions, and parallel.zero_stage "
                    "3 gathers weights for each: choose train.sequence_tokens that the ranks share evenly"
                )
        return self

    @model_validator(mode="after")
    def _tiles_are_possible(self) -> "PretrainConfig":
        setting = "memory.tile_tokens" if self.memory.tile_tokens else "train.truncate_tokens"
        if self.memory.tile_tokens and self.train.truncate_tokens:
            raise ValueError(
                "memory.tile_tokens trains exactly, train.truncate_tokens in stretches whose gradients end at their "
                "first token: give one of them"
            )
        if self.memory.tile_tokens or self.train.truncate_tokens:
            if obstacle := self.model.obstacle_to_tiles:
                raise ValueError(f"{setting}: {obstacle}")
            if self.parallel.zero_stage == 3:
                raise ValueError(
                    f"{setting} goes through all layers for each tile, and parallel.zero_stage 3 gathers the weights "
                    "of each layer anew: choose stage 0, 1 or 2"
                )
        return self

    @property
    def run_folder(self) -> Path:
        return Path("runs") / self.run.name

    @property
    def batch_tokens(self) -> int:
        return self.train.batch_sequences * self.train.sequence_tokens

    @property
    def row_tokens(self) -> int:
        """Of each row of a micro-batch: packed documents of all its sequences lie in one."""
        packed = self.data.packing == "best-fit"
        return self.train.sequence_tokens * (self.train.micro_batch_sequences if packed else 1)

    @property
    def held_tokens(self) -> int:
        """Of each row, in memory at once on all sequence ranks; memory.tile_tokens = auto counts as whole rows."""
        tile = self.train.truncate_tokens or self.memory.tile_tokens
        return min(self.row_tokens, tile) if isinstance(tile, int) else self.row_tokens

    @property
    def last_step(self) -> int:
        """The step after which this launch leaves."""
        return min(self.train.steps, self.run.stop_step or self.train.steps)

    def what_is_trained(self) -> "PretrainConfig":
        """What two launches of one run must agree on: the rest, how the work is shared out, is the same for all."""
        carried_out = {
            "validation": ValidationConfig(),
            "evaluation": EvaluationConfig(),
            "parallel": ParallelConfig(),
            "memory": MemoryConfig(),
            "checkpoint": CheckpointConfig(),
            "run": RunConfig(name="any"),
        }
        data = self.data.model_copy(update={"workers": 1})
        train = self.train.model_copy(update={"micro_batch_sequences": 1})
        return self.model_copy(update={**carried_out, "data": data, "train": train})

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per rank and step. Raises ConfigError when ranks or batch cannot be shared out evenly."""
        data_ranks, micro_batch = self.parallel.data_ranks(world_size), self.train.micro_batch_sequences
        shared = {"train.batch_sequences": self.train.batch_sequences}
        if self.validation.every:
            shared["validation.sequences"] = self.validation.sequences
        for name, sequences in shared.items():
            if sequences % (data_ranks * micro_batch):
                raise ConfigError(
                    f"{name} {sequences} is not divisible by {data_ranks} data ranks × "
                    f"train.micro_batch_sequences {micro_batch} = {data_ranks * micro_batch}"
                )
        return self.train.batch_sequences // (data_ranks * micro_batch)
