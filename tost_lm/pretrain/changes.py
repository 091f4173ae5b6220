"""Changes between the stages of a run: which a stage may have, and which are refused.

Source of all refusals: a record in a checkpoint, which has the settings that identified what was trained.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tost_lm.config import default_of, differences, differences_of_trees, leaves, validate
from tost_lm.data.loader import Corpora
from tost_lm.data.stages import StageRecord
from tost_lm.errors import ConfigError, DataError
from tost_lm.model.config import ModelConfig
from tost_lm.model.lm import parameter_shapes
from tost_lm.optim.settings import OptimConfig, learning_rate, warmup_steps
from tost_lm.pretrain.settings import CARRIED_OUT, PretrainConfig, Stage


def record_of(stage: Stage, corpora: Corpora, given: Stage) -> StageRecord:
    """The record of a stage that starts. `given` has its settings as the user gave them, perhaps with a warm-up that it
    does not have."""
    config = stage.config
    return StageRecord(
        stage.name,
        stage.first_step,
        corpora.sources,
        config.train.seq_len,
        config.data.packing,
        config.train.global_batch_size,
        warmup_steps(config.optim, stage.schedule_steps),
        stage.schedule_from,
        settings=given.what_is_trained(),
    )


def require_same_kind(stages: Sequence[Stage], model: ModelConfig, tokenizer_sha256: str) -> None:
    """Raises ConfigError unless all stages have the shape of the model, DataError unless they have its tokenizer."""
    for stage in stages:
        require_same_shape(model, stage.config.model, f"stage {stage.name}")
        if Corpora.open(stage.config.data.folders).tokenizer().sha256 != tokenizer_sha256:
            raise other_tokenizer(f"stage {stage.name}", stage.config)


def require_unchanged(stage: Stage, records: Sequence[StageRecord], run_folder: Path, *, is_first: bool) -> None:
    """Raises ConfigError unless a stage that has ended is as it was."""
    record = [one for one in records if one.first_step < stage.config.train.steps][-1]
    last = stage.config.train.steps
    changed = changes(record.settings, stage, last) + _other_start(stage, records, is_first=is_first)
    if changed:
        raise ConfigError(
            f"{run_folder}: stage {stage.name} has ended; undo the change, or branch from a checkpoint: run.name=NEW "
            "train.branch_from=CHECKPOINT\n" + "\n".join(changed)
        )


def _other_start(stage: Stage, records: Sequence[StageRecord], *, is_first: bool) -> list[str]:
    """A line if a stage of [[stages]] did not begin where it says; one that 0.1.0 added may have followed."""
    if is_first or any(record.first_step == stage.first_step for record in records):
        return []
    return [f"from_step of stage {stage.name}: {records[-1].first_step} → {stage.first_step}"]


def as_recorded(stage: Stage, records: Sequence[StageRecord], step: int, run_folder: Path, *, is_first: bool) -> Stage:
    """The stage that is under way, which may have begun later than the settings say: it is a branch, or 0.1.0 added it.

    Raises:
        ConfigError: the run has other settings, or other learning rates so far.
    """
    record = records[-1]
    here = stage._replace(first_step=record.first_step, schedule_from=record.schedule_from)
    if record.first_step != stage.first_step or (is_first and record.first_step):
        here = _with_warmup(here, record.warmup_steps)
    changed = changes(record.settings, stage, step) + _other_start(stage, records, is_first=is_first)
    if changed:
        raise other_settings(run_folder, changed, one_more_stage(step))
    _require_same_rates(record, here, step, run_folder)
    return here


def branched(stage: Stage, before: StageRecord, step: int) -> Stage:
    """A branch that starts after `step` steps of a run. It has a warm-up only if its settings ask for another one.

    Raises:
        ConfigError: it has another optimizer, or no steps.
    """
    config, recorded = stage.config, before.settings["optim"]
    if step >= config.train.steps:
        raise ConfigError(
            f"stage branch: is after step {step}, and train.steps is {config.train.steps}; set more steps"
        )
    if recorded["kind"] != config.optim.kind:
        raise ConfigError(f'stage branch: has the state of another optimizer; set optim.kind = "{recorded["kind"]}"')
    asks_for_warmup = config.optim.warmup_steps not in (None, recorded["warmup_steps"])
    here = _with_warmup(stage, config.optim.warmup_steps or 0 if asks_for_warmup else 0)
    return here._replace(name="branch", first_step=step, schedule_from=step)


def _with_warmup(stage: Stage, steps: int) -> Stage:
    optim = stage.config.optim.model_copy(update={"warmup_steps": steps})
    return stage._replace(config=stage.config.model_copy(update={"optim": optim}))


def changes(recorded: dict[str, Any], new: Stage, step: int) -> list[str]:
    """A line for each setting that identifies what is trained in the run's first `step` steps, beside those that may
    change with equal rates so far."""
    lines = _lines(recorded, new, step)
    return lines if {line.partition(":")[0] for line in lines} - MAY_CHANGE else []


def _lines(recorded: dict[str, Any], new: Stage, step: int) -> list[str]:
    trained = {name: section for name, section in recorded.items() if name not in CARRIED_OUT}
    known, ours = dict(leaves(trained)), dict(leaves(new.what_is_trained()))
    for tree in (known, ours):  # later steps may be skipped
        tree["data.skip_steps"] = [[a, min(b, step)] for a, b in tree.get("data.skip_steps", []) if a <= step]
    # An earlier version had no such setting; it trained as the default value does.
    defaults = {path: default_of(PretrainConfig, path) for path in ours.keys() - known.keys()}
    lines = differences_of_trees(defaults | known, ours)
    # The context follows from train.seq_len.
    return [line for line in lines if not line.startswith("model.context_length")]


MAY_CHANGE = {"train.steps", "optim.warmup_steps"}
"""Settings that may change if the learning rates of the steps so far do not."""


def one_more_stage(step: int) -> str:
    """How a run goes on with other settings."""
    return f"make the change one more stage: [[stages]] with from_step = {step}"


def other_settings(folder: Path, changed: Sequence[str], fix: str) -> ConfigError:
    first = f"{folder}: this run has other settings; undo the change, choose another run.name, or {fix}"
    return ConfigError("\n".join([first, *changed]))


def other_tokenizer(what: str, config: PretrainConfig) -> DataError:
    return DataError(
        f"{what}: its tokenizer is not that of the shards in {', '.join(map(str, config.data.folders))}; build the "
        "shards with its tokenizer"
    )


def require_same_shape(theirs: ModelConfig, ours: ModelConfig, what: str) -> list[str]:
    """A line for each setting that differs. Raises ConfigError with them unless both have the same parameters and
    heads."""
    changed = [f"model.{line}" for line in differences(_in_use(theirs), _in_use(ours))]
    if parameter_shapes(theirs) == parameter_shapes(ours) and theirs.heads == ours.heads:
        return changed
    raise ConfigError(
        f"{what}: a run keeps the shape of its model; undo the change, or start a model of this shape with another "
        "run.name\n" + "\n".join(changed)
    )


def _in_use(model: ModelConfig) -> ModelConfig:
    """The model with default values for settings that it does not use."""
    return validate(ModelConfig, {**model.in_use(), "context_length": 1}, "model")


def _require_same_rates(record: StageRecord, new: Stage, step: int, run_folder: Path) -> None:
    """Raises ConfigError unless a stage has the learning rates of its record in the run's first `step` steps."""
    old_steps, steps = record.settings["train"]["steps"] - record.schedule_from, new.schedule_steps
    old = validate(OptimConfig, {**record.settings["optim"], "warmup_steps": record.warmup_steps}, "optim")
    optim = new.config.optim.model_copy(update={"warmup_steps": warmup_steps(new.config.optim, steps)})
    done = step - record.schedule_from
    is_same = lambda n: learning_rate(n, old_steps, old) == learning_rate(n, steps, optim)
    if (old, old_steps) == (optim, steps) or (done <= steps and all(map(is_same, range(done)))):
        return
    fix = f"undo the change, or {one_more_stage(step)}"
    if optim.warmup_steps != record.warmup_steps:
        fix = f"set optim.warmup_steps={record.warmup_steps}"
    changed = ", ".join(_lines(record.settings, new, step))
    raise ConfigError(
        f"{run_folder}: {changed}: optim.schedule {optim.schedule} would end before step {step} of the checkpoint, or "
        f"have other learning rates up to it; {fix}"
    )


def require_same_model(theirs: ModelConfig, ours: ModelConfig, what: str) -> list[str]:
    """A line for each setting of the rotary embedding that differs, which may also be dropped. Raises ConfigError if
    others differ."""
    changed, may_change = [f"model.{line}" for line in differences(_in_use(theirs), _in_use(ours))], set[str]()
    if theirs.rotary:
        may_change = {f"model.{spec.section}.{name}" for spec, _ in ours.mixers for name in spec.extends_context}
    if others := [line for line in changed if line.partition(":")[0] not in may_change]:
        first = f"{what}: its model differs from [model]; set [model] to the same values"
        raise ConfigError("\n".join([first, *others]))
    return changed
