"""Initial weights from a checkpoint: of a second phase of pre-training, or of a branch of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tost_lm.config import differences
from tost_lm.data.mixture import Corpora
from tost_lm.data.tokenizers import find_tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import sha256_file
from tost_lm.model.checkpoint import MANIFEST, find_checkpoint, read_model_config, step_folders, verify_checkpoint
from tost_lm.training.branch import find_branch_point
from tost_lm.training.config import PretrainConfig
from tost_lm.training.progress import Progress


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
        ConfigError: its model differs from [model] (a line for each difference), or as `find_branch_point`.
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
    # The fields that a preset fills in are compared, not its name.
    theirs, ours = (model.model_copy(update={"preset": None}) for model in (read_model_config(folder), config.model))
    if changed := differences(theirs, ours):
        raise ConfigError(
            f"{what}: its model differs from [model]; set [model] to the same values "
            "(tost extend extends the context)\n" + "\n".join(f"model.{line}" for line in changed)
        )
    if sha256_file(find_tokenizer(folder)) != corpora.tokenizer().sha256:
        raise DataError(
            f"{what}: its tokenizer is not that of the shards in "
            f"{', '.join(map(str, config.data.folders))}; build the shards with its tokenizer"
        )
    progress = find_branch_point(config, corpora, folder) if branch else None
    return InitialWeights(folder, sha256_file(folder / MANIFEST), progress)
