"""Where a run starts: at its newest valid checkpoint, at one that it branches from, or with initial weights."""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tost_lm.data.mixture import Corpora
from tost_lm.errors import CheckpointError, DamagedCheckpointError, TostError
from tost_lm.model.checkpoint import verify_checkpoint
from tost_lm.parallel.agreement import error_of_all_ranks, require_agreement
from tost_lm.training import checkpoint
from tost_lm.training.config import PretrainConfig
from tost_lm.training.initial_weights import find_initial_weights
from tost_lm.training.progress import Progress
from tost_lm.training.run_folder import StartPoint, find_start_point


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
        return checkpoint.restore(engine, start.resume_from)
    if initial and initial.progress:
        checkpoint.restore(engine, initial.folder)
        return initial.progress
    if initial:
        checkpoint.load_weights(engine, initial.folder)
    else:
        checkpoint.draw_weights(engine)
    return Progress(0, 0, shards_fingerprint=corpora.fingerprint, tokenizer_sha256=corpora.tokenizer().sha256)
