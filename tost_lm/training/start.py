"""Where a run starts: at its newest valid checkpoint, at one that it branches from, or with initial weights."""

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.checkpointing.format import SETTINGS, Progress, verify_checkpoint
from tost_lm.checkpointing.reading import load_weights, restore
from tost_lm.checkpointing.run_folder import FLIGHT_RECORDER, find_checkpoint, step_folders
from tost_lm.config import differences, load_config
from tost_lm.data.loader import Corpora
from tost_lm.errors import CheckpointError, ConfigError, DamagedCheckpointError, TostError
from tost_lm.parallel.agreement import error_of_all_ranks, require_agreement
from tost_lm.parallel.zero import draw_weights
from tost_lm.training.config import PretrainConfig
from tost_lm.training.initial_weights import InitialWeights, find_initial_weights, require_same_rates

MAY_CHANGE = {"train.steps", "optim.warmup_steps"}
"""Settings that may change if the learning rates of the steps so far do not."""


class StartPoint(NamedTuple):
    """What a launch starts from."""

    resume_from: Path | None
    """The newest valid checkpoint; None: the run starts from step 0."""
    restart_reason: str = ""
    """Why the old run in the folder is renamed first; empty: it is not."""
    checkpoints: tuple[Path, ...] = ()
    """The checkpoints that the folder had when this was determined."""
    initial_weights: InitialWeights | None = None
    """Of a run that starts from step 0; None: they are drawn at random."""

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
        ConfigError: the folder is not a run folder, its run has other settings (a line for each), or other learning
            rates so far.
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
    if {line.partition(":")[0] for line in changed} - MAY_CHANGE:
        lines = [f"{folder}: this run has other settings; choose another run.name or undo the change"]
        raise ConfigError("\n".join(lines + changed))
    if not step_folders(folder):
        return None
    checkpoint = find_checkpoint(folder, warn, verify)
    progress = Progress.read(checkpoint)
    require_same_rates(recorded, config, progress.step, f"{folder}: {', '.join(changed)}", folder)
    if progress.shards_fingerprint != fingerprint:
        raise CheckpointError(
            f"{checkpoint}: was trained on other shards than those in {', '.join(map(str, config.data.folders))}; "
            "choose another run.name"
        )
    return checkpoint


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
        folder = config.run_folder
        renamed = folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        print(f"{start.restart_reason}\nrenamed {folder} to {renamed}; the run restarts", flush=True)
        folder.rename(renamed)


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
