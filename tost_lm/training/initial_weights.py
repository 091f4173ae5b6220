"""Initial weights from a checkpoint: for a second phase of pre-training, or to continue a run of the released code."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tost_lm.config import differences
from tost_lm.data.mixture import Corpora
from tost_lm.data.tokenizers import find_tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import sha256_file
from tost_lm.model.checkpoint import MANIFEST, StoredTensors, find_checkpoint, read_model_config
from tost_lm.training.config import PretrainConfig
from tost_lm.training.progress import Progress


class InitialWeights(NamedTuple):
    """A checkpoint folder whose files match their hashes."""

    folder: Path
    manifest_sha256: str
    """Identifies the weights, because the manifest has a hash of each file."""
    progress: Progress | None = None
    """Where `train.initial_optimizer` continues; None: the run starts at step 0 with a new optimizer."""


def find_initial_weights(
    config: PretrainConfig, corpora: Corpora, warn: Callable[[str], None] = print
) -> InitialWeights | None:
    """The checkpoint of `train.initial_weights`; None: the setting is absent.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: its model differs from [model] (a line for each difference), it has no optimizer state for
            `train.initial_optimizer`, or its schedule is over.
        DataError: its tokenizer is not that of the shards.
    """
    if config.train.initial_weights is None:
        return None
    folder = find_checkpoint(config.train.initial_weights, warn)
    # The fields that a preset fills in are compared, not its name.
    theirs, ours = (model.model_copy(update={"preset": None}) for model in (read_model_config(folder), config.model))
    if changed := differences(theirs, ours):
        raise ConfigError(
            f"train.initial_weights {folder}: its model differs from [model]; set [model] to the same values "
            "(tost extend extends the context)\n" + "\n".join(f"model.{line}" for line in changed)
        )
    if sha256_file(find_tokenizer(folder)) != corpora.tokenizer().sha256:
        raise DataError(
            f"train.initial_weights {folder}: its tokenizer is not that of the shards in "
            f"{', '.join(map(str, config.data.folders))}; build the shards with its tokenizer"
        )
    return InitialWeights(folder, sha256_file(folder / MANIFEST), _progress(config, folder))


def _progress(config: PretrainConfig, folder: Path) -> Progress | None:
    if not config.train.initial_optimizer:
        return None
    if not StoredTensors(folder, "optimizer"):
        raise ConfigError(
            f"train.initial_optimizer: {folder} has no optimizer state; remove train.initial_optimizer to start with a "
            "new optimizer"
        )
    progress = Progress.read(folder)
    if progress.step >= config.train.steps:
        raise ConfigError(
            f"train.initial_optimizer: {folder} is after step {progress.step} and train.steps is {config.train.steps}: "
            "set more steps"
        )
    return progress
