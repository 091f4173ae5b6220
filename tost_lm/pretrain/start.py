"""Where a run starts: at its newest valid checkpoint, at one that it branches from, or with initial weights.

Initial weights are those of a second phase of pre-training. A branch, and a run with another number of steps, change
their schedule after some steps.
"""

import gc
import time
from collections.abc import Callable, Mapping
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
from tost_lm.config import differences, load_config, validate
from tost_lm.data.loader import Corpora
from tost_lm.data.tokenizers import find_tokenizer
from tost_lm.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError, TostError
from tost_lm.files import sha256_file
from tost_lm.model.config import ModelConfig
from tost_lm.optim.settings import steps_before_decay, warmup_steps
from tost_lm.parallel.agreement import error_of_all_ranks, require_agreement, settings_as_facts, versions_as_facts
from tost_lm.parallel.zero import draw_weights
from tost_lm.pretrain.settings import PretrainConfig, TrainingDataConfig


class InitialWeights(NamedTuple):
    """A checkpoint folder."""

    folder: Path
    manifest_sha256: str
    """Identifies the weights, because the manifest has a hash of each file."""
    progress: Progress | None = None
    """Where a branch continues; None: the run starts at step 0 with a new optimizer."""


def find_initial_weights(
    config: PretrainConfig,
    corpora: Corpora,
    warn: Callable[[str], None] = print,
    verify: Callable[[Path], None] = verify_checkpoint,
) -> InitialWeights | None:
    """The checkpoint of `train.initial_weights` or `train.branch_from`; None: neither is set.

    `verify` raises CheckpointError for a damaged checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: its model differs from [model] (a line for each difference), except in the base of its rotary
            embedding; or as `_find_branch_point`.
        DataError: its tokenizer is not that of the shards.
    """
    branch, path = config.train.branch_from is not None, config.train.branch_from or config.train.initial_weights
    if path is None:
        return None
    what = f"train.{'branch_from' if branch else 'initial_weights'} {path}"
    if branch and not path.is_dir():
        raise ConfigError(f"{what}: no such folder; give the step folder to branch from")
    if branch and not (path / MANIFEST).is_file() and (steps := step_folders(path)):
        raise ConfigError(f"{what}: is a run folder; name the checkpoint to branch from, such as {steps[-1]}")
    folder = find_checkpoint(path, warn, verify)
    theirs, ours = (
        validate(ModelConfig, {**model.in_use(), "context_length": 1}, "model")
        for model in (read_model_config(folder), config.model)
    )
    if not branch and theirs.softmax.rope_theta and ours.softmax.rope_theta:
        softmax = theirs.softmax.model_copy(update={"rope_theta": ours.softmax.rope_theta})
        theirs = theirs.model_copy(update={"softmax": softmax})  # another base may extend the context
    if changed := differences(theirs, ours):
        raise ConfigError(
            f"{what}: its model differs from [model]; set [model] to the same values\n"
            + "\n".join(f"model.{line}" for line in changed)
        )
    if sha256_file(find_tokenizer(folder)) != corpora.tokenizer().sha256:
        raise DataError(
            f"{what}: its tokenizer is not that of the shards in "
            f"{', '.join(map(str, config.data.folders))}; build the shards with its tokenizer"
        )
    progress = _find_branch_point(config, corpora, folder) if branch else None
    return InitialWeights(folder, sha256_file(folder / MANIFEST), progress)


def _find_branch_point(config: PretrainConfig, corpora: Corpora, folder: Path) -> Progress:
    """Where a branch from the checkpoint `folder` starts.

    Raises:
        ConfigError: the checkpoint has no optimizer state or is after the last step of the branch, its run has other
            settings than those that a branch may change (a line for each), or other learning rates so far.
    """
    what = f"train.branch_from {folder}"
    if not StoredTensors(folder, "optimizer"):
        raise ConfigError(
            f"{what}: has no optimizer state; set train.initial_weights instead, to start with a new optimizer"
        )
    theirs = Progress.read(folder)
    if theirs.step >= config.train.steps:
        raise ConfigError(
            f"{what}: is after step {theirs.step}, and train.steps is {config.train.steps}; set more steps"
        )
    ours = replace(
        theirs, wandb_run_id="", shards_fingerprint=corpora.fingerprint, tokenizer_sha256=corpora.tokenizer().sha256
    )
    if not (folder / SETTINGS).is_file():
        if config.optim.kind != "adamw":
            raise ConfigError(f'{what}: has the state of AdamW; set optim.kind = "adamw"')
        return ours  # converted from the released code, whose settings and data order are not known here
    trunk = load_config(PretrainConfig, folder / SETTINGS)
    if changed := differences(_settings_of_all_branches(trunk), _settings_of_all_branches(config)):
        raise ConfigError(
            f"{what}: its run has other settings; undo the change, or start a new schedule from its weights with "
            "train.initial_weights\n" + "\n".join(changed)
        )
    require_same_rates(trunk, config, theirs.step, what, folder.parent.parent)
    if theirs.shards_fingerprint == corpora.fingerprint and trunk.data.packing == config.data.packing:
        return ours
    return replace(
        ours,
        data_start=theirs.step,
        recent=(),
        validation_loss=None,
        lowest_validation_loss=None,
        validations_since_lowest=0,
    )


def require_same_rates(old: PretrainConfig, new: PretrainConfig, step: int, what: str, run_folder: Path) -> None:
    """Raises ConfigError unless `new` has the learning rates of `old` in the first `step` steps.

    Args:
        old: settings of the run in `run_folder`; they differ from `new` in the schedule and train.steps at most.
        what: the beginning of the message.
    """
    if _schedule(old) == _schedule(new):
        return
    stable = steps_before_decay(old.optim, old.train.steps)
    if step > stable:
        fix = "undo the change, or start a new schedule from its weights: run.name=NEW train.initial_weights=…"
        earlier = [folder for folder in step_folders(run_folder) if folder.name <= f"step_{stable:08d}"]
        if old.optim.schedule == "wsd" and earlier:
            fix = f"branch from a checkpoint before the decay: run.name=NEW train.branch_from={earlier[-1]}"
        raise ConfigError(
            f"{what}: the learning rate of its run (optim.schedule {old.optim.schedule}) decays after step {stable}, "
            f"and the checkpoint is after step {step}; {fix}"
        )
    was, now = (warmup_steps(config.optim, config.train.steps) for config in (old, new))
    if was != now:
        raise ConfigError(f"{what}: the warm-up would have {now} steps in place of {was}; set optim.warmup_steps={was}")
    stable = steps_before_decay(new.optim, new.train.steps)
    if step > stable:
        fix = f"set train.steps to at least {step + new.train.steps - stable}"
        if new.optim.schedule in ("cosine", "linear"):
            fix = "set optim.schedule to wsd or constant"
        raise ConfigError(
            f"{what}: optim.schedule {new.optim.schedule} would decay or end after step {stable}, and the checkpoint "
            f"is after step {step}; {fix}"
        )


def _schedule(config: PretrainConfig) -> tuple[object, ...]:
    optim, steps = config.optim, config.train.steps
    return optim.schedule, optim.min_lr, optim.decay_steps, warmup_steps(optim, steps), steps


def _settings_of_all_branches(config: PretrainConfig) -> PretrainConfig:
    """The settings that a branch has in common with its run; all others have fixed values."""
    trained = config.what_is_trained()
    schedule = {"schedule": "constant", "decay_steps": None, "min_lr": 0.0, "warmup_steps": None}
    length = {"steps": 1, "branch_from": None, "initial_weights": None}
    return trained.model_copy(
        update={
            "data": TrainingDataConfig(folder=Path("any")),
            "optim": trained.optim.model_copy(update=schedule),
            "train": trained.train.model_copy(update=length),
        }
    )


MAY_CHANGE = {"train.steps", "optim.warmup_steps"}
"""Settings that may change if the learning rates of the steps so far do not."""


class StartPoint(NamedTuple):
    """The start of a launch: a checkpoint, initial weights or neither."""

    resume_from: Path | None
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
    corpora: Corpora,
    warn: Callable[[str], None] = print,
    *,
    damaged: Mapping[Path, str] | None = None,
    hash_shards: bool = False,
) -> StartPoint:
    """Determine what a launch starts from; nothing is changed.

    Args:
        damaged: checkpoints that are known to be damaged, and how.
        hash_shards: also hash the shards of checkpoints, which `start_engine` does when it reads them.

    Raises: as `find_start_point` and `find_initial_weights`.
    """

    def verify(folder: Path) -> None:
        if folder in (damaged or {}):
            raise CheckpointError((damaged or {})[folder])
        verify_checkpoint(folder, hash_shards=hash_shards)

    start = find_start_point(config, corpora.fingerprint, warn, verify)
    if start.resume_from is None:
        start = start._replace(initial_weights=find_initial_weights(config, corpora, warn, verify))
    return start


def find_start_point(
    config: PretrainConfig,
    fingerprint: str,
    warn: Callable[[str], None] = print,
    verify: Callable[[Path], None] = verify_checkpoint,
) -> StartPoint:
    """Determine what a launch on shards of this fingerprint starts from; nothing is changed.

    `verify` raises CheckpointError for a damaged checkpoint, which is skipped with a message to `warn`.

    Raises:
        ConfigError: the folder is not a run folder, its run has other settings (a line for each), its checkpoint is
            of a run with other settings, or with other learning rates so far.
        CheckpointError: all checkpoints of the run are damaged, or were trained on other shards.
    With `run.on_config_change = "restart"` only a folder that is not a run folder raises.
    """
    folder = config.run_folder
    if not (folder / SETTINGS).exists():
        if folder.exists() and not (folder.is_dir() and all(map(_of_an_ended_first_launch, folder.iterdir()))):
            raise ConfigError(f"{folder}: exists and is not a run folder (no config.toml); choose another run.name")
        return StartPoint(None)
    checkpoints = tuple(step_folders(folder))
    try:
        return StartPoint(_checkpoint_of_same_run(config, fingerprint, warn, verify), checkpoints=checkpoints)
    except (ConfigError, CheckpointError) as error:
        if config.run.on_config_change == "refuse":
            raise
        return StartPoint(None, str(error), checkpoints)


def _checkpoint_of_same_run(
    config: PretrainConfig, fingerprint: str, warn: Callable[[str], None], verify: Callable[[Path], None]
) -> Path | None:
    folder = config.run_folder
    recorded = load_config(PretrainConfig, folder / SETTINGS)
    changed = differences(recorded.what_is_trained(), config.what_is_trained())
    if _not_allowed(changed):
        lines = [f"{folder}: this run has other settings; choose another run.name or undo the change"]
        raise ConfigError("\n".join(lines + changed))
    if not step_folders(folder):
        return None
    checkpoint = find_checkpoint(folder, warn, verify)
    progress = Progress.read(checkpoint)
    if (checkpoint / SETTINGS).is_file():  # it may have been copied from another run
        recorded = load_config(PretrainConfig, checkpoint / SETTINGS)
        changed = differences(recorded.what_is_trained(), config.what_is_trained())
        if _not_allowed(changed):
            raise ConfigError(
                f"{checkpoint}: was saved by a run with other settings ({', '.join(changed)}); delete it, or choose "
                "another run.name"
            )
    require_same_rates(recorded, config, progress.step, f"{folder}: {', '.join(changed)}", folder)
    if progress.shards_fingerprint != fingerprint:
        raise CheckpointError(
            f"{checkpoint}: was trained on other shards than those in {', '.join(map(str, config.data.folders))}; "
            "choose another run.name"
        )
    return checkpoint


def _not_allowed(changed: list[str]) -> set[str]:
    """The changed settings that identify the run."""
    return {line.partition(":")[0] for line in changed} - MAY_CHANGE


def _of_an_ended_first_launch(path: Path) -> bool:
    """Whether a launch that ended before it wrote its settings may have left this."""
    return path.name.startswith(".") or path.name == FLIGHT_RECORDER


def require_same_checkpoints(config: PretrainConfig, start: StartPoint) -> None:
    """Raises ConfigError when another launch has changed the checkpoints since `find_start_point`."""
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


def require_same_start(
    config: PretrainConfig, corpora: Corpora, start: StartPoint, of_evaluation: Mapping[str, str]
) -> None:
    """Raises ConfigError on all ranks unless they have the same settings, data, start, packages and code.

    Args:
        of_evaluation: facts about the evaluation during training, by name.
    """
    facts = {**settings_as_facts(config), "shards": corpora.fingerprint, "checkpoint": str(start.resume_from)}
    if start.initial_weights:
        facts["initial weights"] = start.initial_weights.manifest_sha256
    require_agreement(
        {**facts, **of_evaluation, **versions_as_facts()},
        "start all ranks with the same settings, shards, packages and code, from one shared folder",
    )


def start_engine(
    build: Callable[[], Any],
    config: PretrainConfig,
    corpora: Corpora,
    start: StartPoint,
    warn: Callable[[str], None] = print,
) -> tuple[Any, Progress, StartPoint]:
    """A new engine with the state of `start`, or if its checkpoint is damaged, of the newest valid one.

    All ranks call it together. The engine of `build` has no values yet.

    Returns:
        The engine, its progress, and what it starts from.

    Raises:
        TostError: as `find_start`, on all ranks.
    """
    damaged: dict[Path, str] = {}
    while True:
        engine = build()
        try:
            return engine, _set_state(engine, corpora, start), start
        except DamagedCheckpointError as error:
            assert start.weights_from is not None
            damaged[start.weights_from] = str(error)
        del engine
        gc.collect()
        try:
            start = find_start(config, corpora, warn, damaged=damaged)
        except TostError as error:
            raise error_of_all_ranks([str(error)], type(error)) from None
        require_agreement({"checkpoint": str(start.weights_from)}, "start all ranks from one shared folder")


def _set_state(engine: Any, corpora: Corpora, start: StartPoint) -> Progress:
    initial = start.initial_weights
    if start.resume_from:
        return restore(engine, start.resume_from)
    if initial and initial.progress:
        restore(engine, initial.folder)
        return initial.progress
    if initial:
        load_weights(engine, initial.folder)
    else:
        draw_weights(engine)
    return Progress(0, 0, shards_fingerprint=corpora.fingerprint, tokenizer_sha256=corpora.tokenizer().sha256)
