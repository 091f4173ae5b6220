"""What this rank reads of each training step, and of the held-out documents."""

from typing import Literal

from tost_lm.data.loader import Share, TrainingBatches
from tost_lm.data.mixture import Corpora
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
    """This rank's share of every batch; of the held-out documents, only batch 0 is used.

    Raises:
        ConfigError: a corpus is shorter than a sequence.
    """
    train = config.train
    return TrainingBatches(
        corpora,
        Share(mesh.data.rank, mesh.data.size, tuple(tile.columns for tile in tiling.tiles)),
        packing=config.data.packing,
        seed=train.seed,
        batch_sequences=train.batch_sequences if documents == "train" else config.validation.sequences,
        micro_batch_sequences=train.micro_batch_sequences,
        sequence_tokens=train.sequence_tokens,
        ignored_label=IGNORED_LABEL,
        documents=documents,
    )
