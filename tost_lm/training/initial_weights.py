"""The weights that a run begins from, where it does not draw its own: a second phase of pre-training."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tost_lm.config import differences
from tost_lm.data.mixture import Corpora
from tost_lm.data.tokenizers import find_tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import sha256_file
from tost_lm.model.checkpoint import MANIFEST, find_checkpoint, read_model_config
from tost_lm.training.config import PretrainConfig


class InitialWeights(NamedTuple):
    """A checkpoint folder, every byte of which was checked."""

    folder: Path
    manifest_sha256: str
    """Tells weights apart, wherever they lie: the manifest has a hash of each file."""


def find_initial_weights(
    config: PretrainConfig, corpora: Corpora, warn: Callable[[str], None] = print
) -> InitialWeights | None:
    """What `train.initial_weights` names; None: nothing.

    Raises:
        CheckpointError: there are none, or they are damaged.
        ConfigError: they are of another model than [model]; a line for each difference.
        DataError: they were trained on tokens of another tokenizer.
    """
    if config.train.initial_weights is None:
        return None
    folder = find_checkpoint(config.train.initial_weights, warn)
    # A preset only fills in what is compared here.
    theirs, ours = (model.model_copy(update={"preset": None}) for model in (read_model_config(folder), config.model))
    if changed := differences(theirs, ours):
        raise ConfigError(
            f"train.initial_weights {folder}: of another model than [model], which must be as theirs "
            "(python -m pretrain.extend makes them longer)\n" + "\n".join(f"model.{line}" for line in changed)
        )
    if sha256_file(find_tokenizer(folder)) != corpora.tokenizer().sha256:
        raise DataError(
            f"train.initial_weights {folder}: their tokenizer is not that of the shards in "
            f"{', '.join(map(str, config.data.folders))}; build shards with theirs"
        )
    return InitialWeights(folder, sha256_file(folder / MANIFEST))
