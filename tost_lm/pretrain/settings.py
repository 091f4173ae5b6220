"""All settings of a pre-training run, and its stages."""

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import Field, model_validator

from tost_lm.checkpointing.format import SETTINGS, read_model_config
from tost_lm.checkpointing.run_folder import find_checkpoint, step_of
from tost_lm.checkpointing.settings import CheckpointConfig
from tost_lm.config import Section, load_config, merged, path_or_url, read_toml, validate
from tost_lm.errors import ConfigError
from tost_lm.model.config import ModelConfig
from tost_lm.optim.interface import optimizer_of
from tost_lm.optim.settings import OptimConfig, obstacle_to_schedule, warmup_steps
from tost_lm.parallel.settings import LaunchConfig, ParallelConfig, obstacle_to_tensor_ranks, only_with_fsdp
from tost_lm.pretrain.sections import (
    EvaluationConfig,
    MemoryConfig,
    RunConfig,
    StageConfig,
    TrainConfig,
    TrainingDataConfig,
    ValidationConfig,
)

CARRIED_OUT = {"validation", "evaluation", "launch", "parallel", "memory", "checkpoint", "run", "stages"}
"""The sections that do not identify a run. Records of earlier versions have them, with default values."""


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
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    run: RunConfig
    stages: list[StageConfig] = Field(default_factory=list)
    """Later stages of the run, in order."""

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
        if obstacle := self.obstacle():
            raise ValueError(obstacle)
        self.in_stages()
        return self

    def obstacle(self) -> str | None:
        """A problem of the settings with each other; None: there is none."""
        return next(filter(None, chain(self._obstacles_of_model(), self._obstacles_of_deepspeed())), None)

    def in_stages(self) -> "list[Stage]":
        """The stages of the run, the first with the settings outside of [[stages]].

        Raises:
            ConfigError: the settings of a stage are invalid, or it does not follow the stage before it.
        """
        branch = step_of(self.train.branch_from or Path()) or 0
        found = [Stage("start", self.model_copy(update={"stages": []}), branch, branch, is_last=not self.stages)]
        for stage in self.stages:
            found[-1], following = found[-1].followed_by(stage)
            found.append(following._replace(is_last=stage is self.stages[-1]))
        return found

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
        if self.train.seq_len < self.parallel.sequence:
            yield (
                f"train.seq_len {self.train.seq_len} is less than one token for each of parallel.sequence "
                f"{self.parallel.sequence} ranks: lower parallel.sequence"
            )
        yield optimizer_of(self.optim).obstacle(self.parallel.tensor, self.parallel.zero_stage)
        if self.train.compile and self.parallel.tensor > 1:
            yield (
                f"train.compile does not support parallel.tensor {self.parallel.tensor}, whose communication is no part of "
                "a compiled graph: set train.compile = false or parallel.tensor = 1"
            )

    def _obstacles_of_deepspeed(self) -> Iterator[str | None]:
        if self.parallel.engine != "deepspeed":
            return
        only_fsdp = {
            "train.skip_spike_sigma": self.train.skip_spike_sigma,
            "memory.tile_tokens": self.memory.tile_tokens,
            "train.compile at parallel.zero_stage 3": self.train.compile and self.parallel.zero_stage == 3,
            "memory.mlp_tile_tokens at parallel.zero_stage 3": (
                self.memory.mlp_tile_tokens and self.parallel.zero_stage == 3
            ),
        }
        yield from (only_with_fsdp(setting) for setting, is_set in only_fsdp.items() if is_set)

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @property
    def upload_folder(self) -> Path | None:
        """Where its checkpoints are at a URL; None: nowhere."""
        return self.checkpoint.upload and self.checkpoint.upload / self.run.name

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
    def last_step(self) -> int:
        """The last step of this launch."""
        return min(self.train.steps, self.run.stop_at_step or self.train.steps)

    def with_context_of(self, weights: ModelConfig) -> "PretrainConfig":
        """The settings for a model that continues from these weights: it was trained on their context length, too."""
        longest = max(self.model.context_length, weights.context_length)
        return self.model_copy(update={"model": self.model.model_copy(update={"context_length": longest})})

    def on_ranks(self, world_size: int) -> Self:
        """The settings on so many ranks, where a micro-batch has at most the sequences of a rank's batch. Raises as
        `accumulation`."""
        most, rest = divmod(self.train.global_batch_size, self.parallel.data_ranks(world_size))
        micro_batch = self.train.micro_batch_size if rest else min(self.train.micro_batch_size, most)
        config = self.model_copy(update={"train": self.train.model_copy(update={"micro_batch_size": micro_batch})})
        config.accumulation(world_size)
        return config

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per rank and step. Raises ConfigError when the batch cannot be divided evenly over ranks."""
        batch, micro_batch = self.train.global_batch_size, self.train.micro_batch_size
        data_ranks = self.parallel.data_ranks(world_size)
        each = data_ranks * micro_batch
        if batch % each:
            fewer = math.gcd(batch, data_ranks)
            smaller = max(n for n in range(1, micro_batch + 1) if batch // fewer % n == 0)
            sequence = self.parallel.sequence * data_ranks // fewer
            fix = {"parallel.sequence": sequence, "train.micro_batch_size": smaller}
            now = {"parallel.sequence": self.parallel.sequence, "train.micro_batch_size": micro_batch}
            changes = " ".join(f"{name}={value}" for name, value in fix.items() if value != now[name])
            raise ConfigError(
                f"train.global_batch_size {batch} is not divisible by {data_ranks} data ranks × train.micro_batch_size "
                f"{micro_batch} = {each}: set {changes}, or train.global_batch_size={-(-batch // each) * each}"
            )
        return batch // each


class Stage(NamedTuple):
    """A part of a run with settings of its own."""

    name: str
    config: PretrainConfig
    """All its settings; train.steps is its last step, counted over the run."""
    first_step: int
    """Steps of the run before it."""
    schedule_from: int
    """Steps of the run before its schedule."""
    is_last: bool = False

    @property
    def steps(self) -> int:
        return self.config.train.steps - self.first_step

    @property
    def schedule_steps(self) -> int:
        return self.config.train.steps - self.schedule_from

    def what_is_trained(self) -> dict[str, Any]:
        """The settings that identify a run, as its record has them."""
        config, last = self.config, self.config.train.steps
        skipped = [(a, b) for a, b in config.data.skip_steps if b > self.first_step and a <= last]
        data = config.data.model_copy(update={"workers": 1, "skip_steps": skipped})
        optim = config.optim.model_copy(update={"warmup_steps": warmup_steps(config.optim, self.schedule_steps)})
        train = config.train.model_copy(update={"micro_batch_size": 1})
        # Initial weights may raise the context. Plugins are compared by the hashes of their texts.
        model = config.model.model_copy(update={"context_length": config.train.seq_len})
        trained = config.model_copy(update={"model": model, "data": data, "optim": optim, "train": train})
        return trained.model_dump(mode="json", exclude={**dict.fromkeys(CARRIED_OUT, True), "model": {"plugins"}})

    def followed_by(self, changes: StageConfig) -> "tuple[Stage, Stage]":
        """This stage, which ends where the next one starts, and the next one. Raises ConfigError as `in_stages`."""
        what, last = f"stage {changes.name}", self.config.train.steps
        first = last if changes.from_step is None else changes.from_step
        if first <= self.first_step and self.config.train.branch_from:
            raise ConfigError(
                f"{what}: from_step {first}: train.branch_from is after step {self.first_step}; remove the stage, "
                "whose settings the branch does not have, or start it later"
            )
        if not self.first_step < first <= last:
            raise ConfigError(
                f"{what}: from_step {first}: the stage before it, {self.name}, has steps "
                f"{self.first_step + 1} to {last}; set a step after its first, up to {last}"
            )
        here = self.config.train.model_copy(update={"steps": first})
        tree = self.config.model_dump(mode="json", exclude={"model": {"plugins"}, "stages": True})
        tree = merged(PretrainConfig, tree, changes.changes)
        if "warmup_steps" not in changes.optim:
            tree["optim"]["warmup_steps"] = 0
        if changes.tokens:
            length = {name: value for name, value in tree["train"].items() if name != "steps"}
            steps = first + validate(TrainConfig, {**length, "tokens": changes.tokens}, what).steps
            tree["train"]["steps"] = steps
        config = validate(type(self.config), tree, what)
        if config.train.steps <= first:
            raise ConfigError(f"{what}: it has no steps after step {first}; set its tokens or a larger train.steps")
        if obstacle := obstacle_to_schedule(config.optim, config.train.steps - first):
            raise ConfigError(f"{what}: {obstacle}")
        ended = self._replace(config=self.config.model_copy(update={"train": here}))
        return ended, Stage(changes.name, config, first, first)


def longer_batches(path: Path, config: PretrainConfig) -> Iterator[str]:
    """Warnings where train.seq_len is longer than in the file, or in the stage before, and no setting of the batch
    changes with it."""
    configs = [stage.config for stage in config.in_stages()]
    kept = [not {"global_batch_size", "batch_tokens"} & stage.train.keys() for stage in config.stages]
    if path.is_file():
        with suppress(ConfigError):  # a file may lack what the command line sets
            configs, kept = [load_config(type(config), path), *configs], [True, *kept]
    for (before, after), is_kept in zip(pairwise(configs), kept, strict=True):
        length, sequences = after.train.seq_len, after.train.global_batch_size
        if is_kept and length > before.train.seq_len and sequences == before.train.global_batch_size:
            tokens = max(round(before.batch_tokens / length), 1) * length
            yield (
                f"train.seq_len {length} in place of {before.train.seq_len} for {sequences} sequences makes the batch "
                f"{after.batch_tokens / before.batch_tokens:.3g} times as large: {after.batch_tokens:,} tokens a step; "
                f"set train.batch_tokens={tokens} to keep its size"
            )


def _with_model_of_weights(values: dict[str, Any]) -> dict[str, Any]:
    """Without its size, [model] changes that of the weights that the run starts from. Raises CheckpointError if there
    are none."""
    train, model, run = (values.get(name, {}) for name in ("train", "model", "run"))
    if not all(isinstance(section, dict) for section in (train, model, run)) or model.keys() & {"preset", "layers"}:
        return values  # problems are reported as what they are
    name = "initial_weights" if train.get("initial_weights") else "branch_from"
    if not isinstance(path := train.get(name), str):
        return values
    settings = Path(str(run.get("folder", "runs")), str(run.get("name", "")), SETTINGS)
    if settings.is_file():  # resumes, whatever has become of the weights
        theirs = read_toml(settings)["model"]
    else:
        folder = find_checkpoint(path_or_url(f"train.{name}", path), verify=lambda _: None)  # verified when it is read
        theirs = read_model_config(folder).model_dump(mode="json")
    return merged(PretrainConfig, {"model": {**theirs, "plugins": []}}, values)
