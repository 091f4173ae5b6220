"""The training batches and held-out batches of this rank."""

from typing import Literal

from tost_lm.data.loader import BatchShard, TrainingBatches
from tost_lm.data.mixture import Corpora
from tost_lm.errors import ConfigError
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.parallel.mesh import Mesh
from tost_lm.training.config import PretrainConfig
from tost_lm.training.tiled import Tiling


def build_batches(
    config: PretrainConfig,
    corpora: Corpora,
    mesh: Mesh,
    tiling: Tiling,
    documents: Literal["train", "valid"] = "train",
) -> TrainingBatches:
    """This rank's shard of every batch. The held-out split has one batch, number 0.

    Raises:
        ConfigError: a corpus is shorter than a sequence.
    """
    train = config.train
    return TrainingBatches(
        corpora,
        BatchShard(mesh.data.rank, mesh.data.size, tuple(tile.columns for tile in tiling.tiles)),
        packing=config.data.packing,
        seed=train.seed,
        global_batch_size=train.global_batch_size if documents == "train" else config.validation.sequences,
        micro_batch_size=train.micro_batch_size,
        seq_len=train.seq_len,
        ignored_label=IGNORED_LABEL,
        documents=documents,
    )


def check_vocabulary(config: PretrainConfig, corpora: Corpora) -> None:
    """Raises ConfigError when the shards contain tokens without an embedding."""
    if corpora.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {corpora.vocab_size} pieces: "
            f"set model.vocab_size to at least {corpora.vocab_size}"
        )
