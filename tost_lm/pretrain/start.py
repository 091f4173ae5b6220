"""Where a run starts: at its newest valid checkpoint, at one that it branches from, or with initial weights.

Every change of what is trained is one more stage: one of [[stages]], one that is appended to a run
(run.on_config_change=stage), or a branch.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.checkpointing.format import (
    MANIFEST,
    SETTINGS,
    Progress,
    StoredTensors,
    read_model_config,
    verify_checkpoint,
)
from tost_lm.checkpointing.reading import load_weights, restore
from tost_lm.checkpointing.run_folder import FLIGHT_RECORDER, find_checkpoint, step_folders
from tost_lm.config import differences, differences_of_trees, load_config, validate
from tost_lm.data.loader import Corpora
from tost_lm.data.stages import Source, StageRecord
from tost_lm.data.tokenizers import find_tokenizer
from tost_lm.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError, TostError, TrainingError
from tost_lm.files import sha256_file
from tost_lm.model.config import ModelConfig
from tost_lm.model.lm import parameter_shapes
from tost_lm.optim.settings import OptimConfig, steps_before_decay, warmup_steps
from tost_lm.parallel.agreement import error_of_all_ranks, require_agreement, settings_as_facts, versions_as_facts
from tost_lm.parallel.zero import draw_weights
from tost_lm.pretrain.settings import PretrainConfig, Stage


class InitialWeights(NamedTuple):
    """A checkpoint folder."""

    folder: Path
    manifest_sha256: str
    """Identifies the weights, because the manifest has a hash of each file."""
    progress: Progress | None = None
    """Where a branch continues; None: the run starts at step 0 with a new optimizer."""


class StartPoint(NamedTuple):
    """The start of a launch: a checkpoint, initial weights or neither."""

    stage: Stage
    """The stage that the launch trains."""
    corpora: Corpora
    """Its data."""
    records: tuple[StageRecord, ...]
    """The stages of the run so far, that one at the end."""
    resume_from: Path | None = None
    """The newest valid checkpoint; None: the run starts from step 0."""
    restart_reason: str = ""
    """Why the old run in the folder is renamed first; empty: it is not."""
    checkpoints: tuple[Path, ...] = ()
    """The checkpoints that the folder had when this was determined."""
    initial_weights: InitialWeights | None = None
    """Initial weights of a run that starts from step 0; None: they are drawn at random."""

    @property
    def weights_from(self) -> Path | None:
        """The checkpoint that has the first weights of the launch; None: they are drawn at random."""
        return self.resume_from or (self.initial_weights and self.initial_weights.folder)


def find_start(
    config: PretrainConfig,
    warn: Callable[[str], None] = print,
    *,
    damaged: Mapping[Path, str] | None = None,
    hash_shards: bool = False,
    open_corpora: Callable[[Mapping[Path, float]], Corpora] = Corpora.open,
) -> StartPoint:
    """Determine what a launch starts from; nothing is changed.

    Args:
        damaged: checkpoints that are known to be damaged, and how.
        hash_shards: also hash the shards of checkpoints, which `start_engine` does when it reads them.

    Raises:
        ConfigError: the folder is not a run folder, its run has other settings (a line for each), a change is none that
            a stage can have, or as `_with_initial_weights`.
        CheckpointError: all checkpoints of the run are damaged, or were trained on other shards.
        DataError: the shards are damaged, or have another tokenizer.
    With `run.on_config_change = "restart"` only a folder that is not a run folder raises.
    """

    def verify(folder: Path) -> None:
        if folder in (damaged or {}):
            raise CheckpointError((damaged or {})[folder])
        verify_checkpoint(folder, hash_shards=hash_shards)

    def from_step_0() -> StartPoint:
        stage, *later = config.in_stages()
        corpora = open_corpora(stage.config.data.folders)
        _require_same_kind(later, stage.config.model, corpora.tokenizer().sha256, open_corpora)
        start = StartPoint(stage, corpora, (record_of(stage, corpora, stage.config),))
        return _with_initial_weights(config, start, warn, verify)

    folder = config.run_folder
    if not (folder / SETTINGS).exists():
        if folder.exists() and not (folder.is_dir() and all(map(_of_an_ended_first_launch, folder.iterdir()))):
            raise ConfigError(f"{folder}: exists and is not a run folder (no config.toml); choose another run.name")
        return from_step_0()
    checkpoints = tuple(step_folders(folder))
    try:
        if not checkpoints:
            recorded = load_config(PretrainConfig, folder / SETTINGS).in_stages()[0]
            if changed := _changes(settings_of(recorded.config), config.in_stages()[0].config):
                raise _other_settings(folder, changed)
            return from_step_0()
        checkpoint = find_checkpoint(folder, warn, verify)
        return _resumed(config, checkpoint, open_corpora)._replace(resume_from=checkpoint, checkpoints=checkpoints)
    except (ConfigError, CheckpointError) as error:
        if config.run.on_config_change != "restart":
            raise
        return from_step_0()._replace(restart_reason=str(error), checkpoints=checkpoints)


def record_of(stage: Stage, corpora: Corpora, given: PretrainConfig) -> StageRecord:
    """The record of a stage that starts. `given` are its settings as the user gave them, perhaps with a warm-up that it
    does not have."""
    config = stage.config
    return StageRecord(
        stage.name,
        config.first_step,
        corpora.sources,
        config.train.seq_len,
        config.data.packing,
        config.train.global_batch_size,
        warmup_steps(config.optim, config.own_steps),
        settings_of(given),
    )


def _resumed(
    config: PretrainConfig, checkpoint: Path, open_corpora: Callable[[Mapping[Path, float]], Corpora]
) -> StartPoint:
    """The start at a checkpoint of the run, in the stage that its next step is in."""
    progress, stages, run_folder = Progress.read(checkpoint), config.in_stages(), config.run_folder
    step, records = progress.step, progress.stages
    current = max(number for number, one in enumerate(stages) if number == 0 or one.config.first_step <= step)
    given = stage = stages[current]
    begins = current > 0 and stage.config.first_step == step
    for number, finished in enumerate(stages[:current]):
        _require_unchanged(finished, records, run_folder, is_first=number == 0)
    if not begins:
        stage, begins = _as_recorded(stage, records, step, run_folder, is_first=current == 0)
    todo = [stage, *stages[current + 1 :]]
    _require_same_kind(todo, read_model_config(checkpoint), progress.tokenizer_sha256, open_corpora)
    corpora = open_corpora(stage.config.data.folders)
    if not begins:
        if _identities(records[-1].sources) != _identities(corpora.sources):
            raise CheckpointError(
                f"{checkpoint}: was trained on other shards than those in "
                f"{', '.join(map(str, stage.config.data.folders))}; choose another run.name"
            )
        record = replace(records[-1], sources=corpora.sources, settings=settings_of(given.config))  # perhaps more steps
        return StartPoint(stage, corpora, (*records[:-1], record))
    return StartPoint(stage, corpora, (*records, record_of(stage, corpora, given.config)))


def _require_same_kind(
    stages: Sequence[Stage],
    model: ModelConfig,
    tokenizer_sha256: str,
    open_corpora: Callable[[Mapping[Path, float]], Corpora],
) -> None:
    """Raises ConfigError unless all stages have the shape of the model, DataError unless they have its tokenizer."""
    for stage in stages:
        _require_same_shape(model, stage.config.model, f"stage {stage.name}")
        if open_corpora(stage.config.data.folders).tokenizer().sha256 != tokenizer_sha256:
            raise _other_tokenizer(f"stage {stage.name}", stage.config)


def _identities(sources: Sequence[Source]) -> list[tuple[str, float]]:
    return [(source.fingerprint, source.weight) for source in sources]


def _require_unchanged(stage: Stage, records: Sequence[StageRecord], run_folder: Path, *, is_first: bool) -> None:
    """Raises ConfigError unless a stage that has ended is as it was."""
    record = [one for one in records if one.first_step < stage.config.train.steps][-1]
    changed = _changes(record.settings, stage.config)
    if not is_first and record.first_step != stage.config.first_step:
        changed.append(f"from_step: {record.first_step} → {stage.config.first_step}")
    if changed:
        raise ConfigError(
            f"{run_folder}: stage {stage.name} has ended; undo the change, or branch from a checkpoint: run.name=NEW "
            "train.branch_from=CHECKPOINT\n" + "\n".join(changed)
        )


def _as_recorded(
    stage: Stage, records: Sequence[StageRecord], step: int, run_folder: Path, *, is_first: bool
) -> tuple[Stage, bool]:
    """The stage that is under way, which may have begun later than the settings say: it was appended, or is a branch.

    Returns:
        The stage, and whether it begins here.

    Raises:
        ConfigError: the run has other settings, or other learning rates so far. With `run.on_config_change = "stage"`
            a stage with the new settings begins instead.
    """
    record = records[-1]
    here = stage.config.from_step(record.first_step)
    if is_first and record.first_step:
        here = _with_warmup(here, record.warmup_steps)
    changed = _changes(record.settings, stage.config)
    if not is_first and record.first_step != stage.config.first_step:
        changed.append(f"from_step: {record.first_step} → {stage.config.first_step}")
    append = stage.config.run.on_config_change == "stage"
    try:
        if changed:
            raise _other_settings(run_folder, changed)
        _require_same_rates(record, here, step, run_folder)
    except ConfigError:
        if not append:
            raise
        if step >= stage.config.train.steps:
            raise ConfigError(
                f"{run_folder}: is after step {step}, and train.steps is {stage.config.train.steps}; set more steps"
            ) from None
        return appended(Stage(f"from-step-{step}", stage.config, stage.is_last), record, step), True
    return stage._replace(config=here), False


def appended(stage: Stage, before: StageRecord, step: int) -> Stage:
    """A stage that starts after `step` steps of a run. It has a warm-up only if its settings ask for another one.

    Raises:
        ConfigError: it has another optimizer.
    """
    config = stage.config
    optim = before.settings["optim"]
    if optim["kind"] != config.optim.kind:
        raise _other_optimizer(f"stage {stage.name}", optim["kind"])
    asked = config.optim.warmup_steps is not None and config.optim.warmup_steps != optim["warmup_steps"]
    config = _with_warmup(config, config.optim.warmup_steps or 0 if asked else 0)
    return stage._replace(config=config.from_step(step))


def _with_warmup(config: PretrainConfig, steps: int) -> PretrainConfig:
    return config.model_copy(update={"optim": config.optim.model_copy(update={"warmup_steps": steps})})


def settings_of(config: PretrainConfig) -> dict[str, Any]:
    """The settings that identify what is trained, as a record has them."""
    return config.what_is_trained().model_dump(mode="json", exclude={"model": {"plugins"}})


def _changes(recorded: dict[str, Any], new: PretrainConfig) -> list[str]:
    """A line for each setting that identifies what is trained, beside those that may change with equal rates so far."""
    lines = _lines(recorded, new)
    return lines if {line.partition(":")[0] for line in lines} - MAY_CHANGE else []


def _lines(recorded: dict[str, Any], new: PretrainConfig) -> list[str]:
    lines = differences_of_trees(recorded, settings_of(new))
    return [line for line in lines if not line.startswith("model.context_length")]  # it follows from train.seq_len


MAY_CHANGE = {"train.steps", "optim.warmup_steps"}
"""Settings that may change if the learning rates of the steps so far do not."""


def _other_settings(folder: Path, changed: Sequence[str]) -> ConfigError:
    first = (
        f"{folder}: this run has other settings; undo the change, choose another run.name, or go on with the new "
        "settings as one more stage: run.on_config_change=stage"
    )
    return ConfigError("\n".join([first, *changed]))


def _other_optimizer(what: str, kind: str) -> ConfigError:
    return ConfigError(f'{what}: has the state of another optimizer; set optim.kind = "{kind}"')


def _other_tokenizer(what: str, config: PretrainConfig) -> DataError:
    return DataError(
        f"{what}: its tokenizer is not that of the shards in {', '.join(map(str, config.data.folders))}; build the "
        "shards with its tokenizer"
    )


def _require_same_shape(theirs: ModelConfig, ours: ModelConfig, what: str) -> None:
    """Raises ConfigError, with a line for each setting, unless both models have the same parameters."""
    if parameter_shapes(theirs) == parameter_shapes(ours):
        return
    changed = differences(_in_use(theirs), _in_use(ours))
    raise ConfigError(
        f"{what}: a run keeps the shape of its model; undo the change, or start a model of this shape with another "
        "run.name\n" + "\n".join(f"model.{line}" for line in changed)
    )


def _in_use(model: ModelConfig) -> ModelConfig:
    """The model with default values for settings that it does not use."""
    return validate(ModelConfig, {**model.in_use(), "context_length": 1}, "model")


def _require_same_rates(record: StageRecord, new: PretrainConfig, step: int, run_folder: Path) -> None:
    """Raises ConfigError unless a stage has the learning rates of its record in the run's first `step` steps."""
    first = record.first_step
    old = validate(OptimConfig, {**record.settings["optim"], "warmup_steps": record.warmup_steps}, "optim")
    old_steps = record.settings["train"]["steps"] - first
    if _schedule(old, old_steps) == _schedule(new.optim, new.own_steps):
        return
    what = f"{run_folder}: {', '.join(_lines(record.settings, new))}"
    stable = first + steps_before_decay(old, old_steps)
    if step > stable:
        raise ConfigError(
            f"{what}: the learning rate of its run (optim.schedule {old.schedule}) decays after step {stable}, "
            f"and the checkpoint is after step {step}; undo the change, or go on as one more stage: "
            "run.on_config_change=stage"
        )
    was, now = record.warmup_steps, warmup_steps(new.optim, new.own_steps)
    if was != now:
        raise ConfigError(f"{what}: the warm-up would have {now} steps in place of {was}; set optim.warmup_steps={was}")
    stable = first + steps_before_decay(new.optim, new.own_steps)
    if step > stable:
        fix = f"set train.steps to at least {step + new.train.steps - stable}"
        if new.optim.schedule in ("cosine", "linear"):
            fix = "set optim.schedule to wsd or constant"
        raise ConfigError(
            f"{what}: optim.schedule {new.optim.schedule} would decay or end after step {stable}, and the checkpoint "
            f"is after step {step}; {fix}"
        )


def _schedule(optim: OptimConfig, steps: int) -> tuple[object, ...]:
    return optim.schedule, optim.min_lr, optim.decay_steps, warmup_steps(optim, steps), steps


def _with_initial_weights(
    config: PretrainConfig, start: StartPoint, warn: Callable[[str], None], verify: Callable[[Path], None]
) -> StartPoint:
    """The start with the weights of `train.initial_weights` or `train.branch_from`, if one of them is set.

    `verify` raises CheckpointError for a damaged checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: its model differs from [model] (a line for each difference), except in the base of its rotary
            embedding; a branch cannot continue it, or has another shape.
        DataError: its tokenizer is not that of the shards.
    """
    branch, path = config.train.branch_from is not None, config.train.branch_from or config.train.initial_weights
    if path is None:
        return start
    what = f"train.{'branch_from' if branch else 'initial_weights'} {path}"
    if branch and not path.is_dir():
        raise ConfigError(f"{what}: no such folder; give the step folder to branch from")
    if branch and not (path / MANIFEST).is_file() and (steps := step_folders(path)):
        raise ConfigError(f"{what}: is a run folder; name the checkpoint to branch from, such as {steps[-1]}")
    folder = find_checkpoint(path, warn, verify)
    if branch:
        _require_same_shape(read_model_config(folder), config.model, what)
    else:
        _require_same_model(read_model_config(folder), config.model, what)
    if sha256_file(find_tokenizer(folder)) != start.corpora.tokenizer().sha256:
        raise _other_tokenizer(what, start.stage.config)
    weights = InitialWeights(folder, sha256_file(folder / MANIFEST))
    if not branch:
        return start._replace(initial_weights=weights)
    if not StoredTensors(folder, "optimizer"):
        raise ConfigError(
            f"{what}: has no optimizer state; set train.initial_weights instead, to start with a new optimizer"
        )
    theirs = replace(Progress.read(folder), wandb_run_id="", tokenizer_sha256=start.corpora.tokenizer().sha256)
    if theirs.stages:
        stage = appended(start.stage._replace(name="branch"), theirs.stages[-1], theirs.step)
        progress = theirs.in_stage(record_of(stage, start.corpora, start.stage.config))
    else:  # converted from the released code: it goes on with its schedule and its data
        if start.stage.config.optim.kind != "adamw":
            raise _other_optimizer(what, "adamw")
        stage = start.stage._replace(config=start.stage.config.from_step(0))
        progress = theirs.in_stage(record_of(stage, start.corpora, stage.config))
    if theirs.step >= stage.config.train.steps:
        raise ConfigError(
            f"{what}: is after step {theirs.step}, and train.steps is {stage.config.train.steps}; set more steps"
        )
    return start._replace(stage=stage, records=progress.stages, initial_weights=weights._replace(progress=progress))


def _require_same_model(theirs: ModelConfig, ours: ModelConfig, what: str) -> None:
    """Raises ConfigError unless both models are the same but for the base of their rotary embedding."""
    theirs, ours = _in_use(theirs), _in_use(ours)
    if theirs.softmax.rope_theta and ours.softmax.rope_theta:
        softmax = theirs.softmax.model_copy(update={"rope_theta": ours.softmax.rope_theta})
        theirs = theirs.model_copy(update={"softmax": softmax})  # another base may extend the context
    if changed := differences(theirs, ours):
        raise ConfigError(
            f"{what}: its model differs from [model]; set [model] to the same values\n"
            + "\n".join(f"model.{line}" for line in changed)
        )


def _of_an_ended_first_launch(path: Path) -> bool:
    """Whether a launch that ended before it wrote its settings may have left this."""
    return path.name.startswith(".") or path.name == FLIGHT_RECORDER


def require_same_checkpoints(config: PretrainConfig, start: StartPoint) -> None:
    """Raises ConfigError when another launch has changed the checkpoints since `find_start`."""
    if tuple(step_folders(config.run_folder)) != start.checkpoints:
        raise ConfigError(f"{config.run_folder}: another launch has changed its checkpoints; run the command again")


def rename_old_run(config: PretrainConfig, start: StartPoint) -> None:
    """Rename the run folder if the run restarts, and print the reason."""
    if start.restart_reason:
        folder = config.run_folder.resolve() if config.run_folder.is_symlink() else config.run_folder
        renamed = folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        print(f"{start.restart_reason}\nrenamed {folder} to {renamed}; the run restarts", flush=True)
        folder.rename(renamed)
        folder.mkdir()


def require_same_start(start: StartPoint, of_evaluation: Mapping[str, str]) -> None:
    """Raises ConfigError on all ranks unless they have the same settings, data, start, packages and code.

    Args:
        of_evaluation: facts about the evaluation during training, by name.
    """
    facts = {
        **settings_as_facts(start.stage.config),
        "shards": start.corpora.fingerprint,
        "checkpoint": str(start.resume_from),
    }
    if start.initial_weights:
        facts["initial weights"] = start.initial_weights.manifest_sha256
    require_agreement(
        {**facts, **of_evaluation, **versions_as_facts()},
        "start all ranks with the same settings, shards, packages and code, from one shared folder",
    )


def start_engine(
    build: Callable[[], Any], config: PretrainConfig, start: StartPoint, warn: Callable[[str], None] = print
) -> tuple[Any, Progress, StartPoint]:
    """A new engine with the state of `start`, or if its checkpoint is damaged, of the newest valid one.

    All ranks call it together. The engine of `build` has no values yet.

    Args:
        config: all settings of the run, with its stages.

    Returns:
        The engine, its progress, and what it starts from.

    Raises:
        TostError: as `find_start`, or the newest valid checkpoint is in another stage, on all ranks.
    """
    damaged: dict[Path, str] = {}
    while True:
        engine = build()
        try:
            return engine, _set_state(engine, start), start
        except DamagedCheckpointError as error:
            assert start.weights_from is not None
            damaged[start.weights_from] = str(error)
        del engine
        gc.collect()
        stage = start.stage
        try:
            start = find_start(config, warn, damaged=damaged)
            if start.stage.config.first_step != stage.config.first_step:
                raise TrainingError(
                    f"{'; '.join(damaged.values())}: the newest valid checkpoint is in stage {start.stage.name}; "
                    "delete the damaged one, and run the same command to resume there"
                )
        except TostError as error:
            raise error_of_all_ranks([str(error)], type(error)) from None
        require_agreement({"checkpoint": str(start.weights_from)}, "start all ranks from one shared folder")


def _set_state(engine: Any, start: StartPoint) -> Progress:
    initial = start.initial_weights
    if start.resume_from:
        progress = restore(engine, start.resume_from)
        begins = len(start.records) > len(progress.stages)
        return progress.in_stage(start.records[-1]) if begins else replace(progress, stages=start.records)
    if initial and initial.progress:
        restore(engine, initial.folder)
        return initial.progress
    if initial:
        load_weights(engine, initial.folder)
    else:
        draw_weights(engine)
    return Progress(0, 0, tokenizer_sha256=start.corpora.tokenizer().sha256, stages=start.records)
