"""Where a run starts: at its newest valid checkpoint, at one that it branches from, or with initial weights.

Every change of what is trained is one more stage: one of [[stages]], or a branch.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tost_lm.checkpointing.format import (
    MANIFEST,
    PROGRESS,
    SETTINGS,
    Progress,
    StoredTensors,
    read_model_config,
    verify_checkpoint,
)
from tost_lm.checkpointing.reading import load_weights, restore
from tost_lm.checkpointing.run_folder import FLIGHT_RECORDER, HEARTBEATS, find_checkpoint, step_folders
from tost_lm.config import leaves, load_config
from tost_lm.data.loader import Corpora
from tost_lm.data.stages import StageSource
from tost_lm.data.tokenizers import find_tokenizer
from tost_lm.errors import CheckpointError, ConfigError, DamagedCheckpointError, TostError
from tost_lm.files import sha256_file
from tost_lm.parallel.agreement import error_of_all_ranks, require_agreement, settings_as_facts, versions_as_facts
from tost_lm.parallel.engine import Engine
from tost_lm.pretrain.changes import (
    MAY_CHANGE,
    as_recorded,
    branched,
    changes,
    one_more_stage,
    other_settings,
    other_tokenizer,
    record_of,
    require_same_kind,
    require_same_model,
    require_same_shape,
    require_unchanged,
)
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.stage_run import InitialWeights, StageRun
from tost_lm.remote import RemotePath, local_copy


def find_start(
    config: PretrainConfig,
    warn: Callable[[str], None] = print,
    *,
    damaged: Mapping[Path, str] | None = None,
    hash_shards: bool = False,
) -> StageRun:
    """Determine what a launch starts from; nothing is changed.

    Args:
        damaged: checkpoints that are known to be damaged, and how.
        hash_shards: also hash the shards of checkpoints, which `start_engine` does when it reads them.

    Raises:
        ConfigError: the folder is not a run folder, its run has other settings (a line for each), a change is none that
            a stage can have, or as `_with_initial_weights`.
        CheckpointError: all checkpoints of the run are damaged, or were trained on other shards.
        DataError: the shards are damaged, or have another tokenizer.
    """

    def verify(folder: Path) -> None:
        if folder in (damaged or {}):
            raise CheckpointError((damaged or {})[folder])
        verify_checkpoint(folder, hash_shards=hash_shards)

    def from_step_0() -> StageRun:
        stage, *later = config.in_stages()
        corpora = Corpora.open(stage.config.data.folders)
        require_same_kind(later, stage.config.model, corpora.tokenizer().sha256)
        start = StageRun(config, stage, corpora, (record_of(stage, corpora, stage),))
        return _with_initial_weights(start, warn, verify)

    folder = config.run_folder
    if not (folder / SETTINGS).exists():
        if folder.exists() and not (folder.is_dir() and all(map(_of_an_ended_first_launch, folder.iterdir()))):
            raise ConfigError(f"{folder}: exists and is not a run folder (no config.toml); choose another run.name")
        return from_step_0()
    checkpoints = tuple(step_folders(folder))
    if not checkpoints:
        recorded = load_config(PretrainConfig, folder / SETTINGS).in_stages()[0]
        if changed := changes(recorded.what_is_trained(), config.in_stages()[0], 0):
            raise other_settings(folder, changed, "remove the folder, which has no checkpoint")
        return from_step_0()
    newest = find_checkpoint(folder, warn, verify)
    return _resumed(config, newest)._replace(resume_from=newest, checkpoints=checkpoints)


def _resumed(config: PretrainConfig, checkpoint: Path) -> StageRun:
    """The start at a checkpoint of the run, in the stage that its next step is in."""
    progress, stages, run_folder = Progress.read(checkpoint), config.in_stages(), config.run_folder
    step, records = progress.step, progress.stages
    current = max(number for number, one in enumerate(stages) if number == 0 or one.first_step <= step)
    given = stage = stages[current]
    begins = current > 0 and stage.first_step == step
    for number, finished in enumerate(stages[:current]):
        require_unchanged(finished, records, run_folder, is_first=number == 0)
    if not begins:
        stage = as_recorded(stage, records, step, run_folder, is_first=current == 0)
    todo = [stage, *stages[current + 1 :]]
    require_same_kind(todo, read_model_config(checkpoint), progress.tokenizer_sha256)
    corpora = Corpora.open(stage.config.data.folders)
    if not begins:
        if _identities(records[-1].sources) != _identities(corpora.sources):
            raise CheckpointError(
                f"{checkpoint}: was trained on other shards than those in "
                f"{', '.join(map(str, stage.config.data.folders))}; choose another run.name, or {one_more_stage(step)}"
            )
        record = replace(records[-1], sources=corpora.sources, settings=given.what_is_trained())  # perhaps more steps
        return StageRun(config, stage, corpora, (*records[:-1], record))
    return StageRun(config, stage, corpora, (*records, record_of(stage, corpora, given)))


def _identities(sources: Sequence[StageSource]) -> list[tuple[str, float]]:
    return [(source.fingerprint, source.weight) for source in sources]


def _with_initial_weights(start: StageRun, warn: Callable[[str], None], verify: Callable[[Path], None]) -> StageRun:
    """The start with the weights of `train.initial_weights` or `train.branch_from`, if one of them is set.

    `verify` raises CheckpointError for a damaged checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: its model differs from [model] (a line for each difference), except in the base and scaling of its
            rotary embedding, which may be dropped; a branch cannot continue it, or has another shape.
        DataError: its tokenizer is not that of the shards.
    """
    config, train = start.config, start.config.train
    branch, path = train.branch_from is not None, train.branch_from or train.initial_weights
    if path is None:
        return start
    what = f"train.{'branch_from' if branch else 'initial_weights'} {path}"
    if branch and not isinstance(path, RemotePath) and not path.is_dir():
        raise ConfigError(f"{what}: no such folder; give the step folder to branch from")
    if branch and not (path / MANIFEST).is_file() and (steps := step_folders(path)):
        raise ConfigError(f"{what}: is a run folder; name the checkpoint to branch from, such as {steps[-1]}")
    folder = find_checkpoint(path, warn, verify)
    require = require_same_shape if branch else require_same_model
    if changed := require(read_model_config(folder), config.model, what):
        warn(f"{what}: this run changes {', '.join(changed)}")
    if sha256_file(find_tokenizer(folder)) != start.corpora.tokenizer().sha256:
        raise other_tokenizer(what, config)
    weights = InitialWeights(folder, sha256_file(folder / MANIFEST))
    if not branch:
        return start._replace(initial_weights=weights)
    theirs = Progress.read(folder) if StoredTensors(folder, "optimizer") else Progress(0, 0)
    if not theirs.stages:  # an export, or a ckpt.pt that 0.1.0 converted
        raise ConfigError(
            f"{what}: has no optimizer state of a run; set train.initial_weights instead, to start with a new optimizer"
        )
    stage = branched(start.stage, theirs.stages[-1], theirs.step)
    theirs = replace(theirs, wandb_run_id="", tokenizer_sha256=start.corpora.tokenizer().sha256)
    progress = theirs.in_stage(record_of(stage, start.corpora, start.stage))
    return start._replace(stage=stage, records=progress.stages, initial_weights=weights._replace(progress=progress))


def _of_an_ended_first_launch(path: Path) -> bool:
    """Whether a launch that ended before it wrote its settings may have left this."""
    return path.name.startswith(".") or path.name in (FLIGHT_RECORDER, HEARTBEATS)


def require_same_run(url: Path, run_folder: Path) -> None:
    """Raises ConfigError if the checkpoints at a URL are of another run than those in the folder: their first stages
    have other data or settings."""
    theirs, ours = _first_stage(url), _first_stage(run_folder)
    if changed := [name for name in theirs.keys() & ours.keys() - MAY_CHANGE if theirs[name] != ours[name]]:
        raise ConfigError(
            f"{url}: has checkpoints of another run than {run_folder}, with another {', '.join(sorted(changed))}; "
            "choose another run.name or checkpoint.upload"
        )


def _first_stage(run: Path) -> dict[str, Any]:
    """What identifies the first stage of a run, by the record in its newest checkpoint; empty: there is none."""
    for folder in reversed(step_folders(run)):
        with suppress(CheckpointError):
            record = Progress.read(local_copy(folder / PROGRESS).parent).stages[0]
            return {"data": record.samples[0], **dict(leaves(record.settings))}
    return {}


def require_same_checkpoints(start: StageRun) -> None:
    """Raises ConfigError when another launch has changed the checkpoints since `find_start`."""
    folder = start.config.run_folder
    if tuple(step_folders(folder)) != start.checkpoints:
        raise ConfigError(f"{folder}: another launch has changed its checkpoints; run the command again")


def require_same_start(start: StageRun, of_evaluation: Mapping[str, str]) -> None:
    """Raises ConfigError on all ranks unless they have the same settings, data, start, packages and code.

    Args:
        of_evaluation: facts about the evaluation during training, by name.
    """
    facts = {
        **settings_as_facts(start.config),
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
    build: Callable[[], Engine], start: StageRun, warn: Callable[[str], None] = print
) -> tuple[Engine, Progress, StageRun]:
    """A new engine with the state of `start`, or if its checkpoint is damaged, of the newest valid one.

    All ranks call it together. The engine of `build` has no values yet.

    Returns:
        The engine, its progress, and what it starts from.

    Raises:
        TostError: as `find_start`, or the newest valid checkpoint is in another stage, which needs processes of its
            own; on all ranks.
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
        try:
            found = find_start(start.run, warn, damaged=damaged)
        except TostError as error:
            raise error_of_all_ranks([str(error)], type(error)) from None
        require_agreement({"checkpoint": str(found.weights_from)}, "start all ranks from one shared folder")
        if found.stage.first_step != start.stage.first_step:
            raise error_of_all_ranks([*damaged.values()], CheckpointError)
        start = found.with_config(start.config)


def _set_state(engine: Engine, start: StageRun) -> Progress:
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
        engine.draw_weights()
    return Progress(0, 0, tokenizer_sha256=start.corpora.tokenizer().sha256, stages=start.records)
