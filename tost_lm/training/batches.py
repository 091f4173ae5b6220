"""What this rank reads of each training step, and of the held-out documents."""

from typing import Literal

from tost_lm.data.loader import Share, TrainingBatches
from tost_lm.data.mixture import Corpora
from tost_lm.model.lm import IGNORED_LABEL
from tost_lm.ops.split import SequenceSplit
from tost_lm.parallel.mesh import Mesh
from tost_lm.training.config import PretrainConfig


def build_batches(
    config: PretrainConfig,
    corpora: Corpora,
    mesh: Mesh,
    split: SequenceSplit,
    documents: Literal["train", "valid"] = "train",
) -> TrainingBatches:
    """This rank's share of every batch; of the held-out documents, only batch 0 is used.

    Raises:
        ConfigError: a corpus is shorter than a sequence.
    """
    train = config.train
    return TrainingBatches(
        corpora,
        Share(mesh.data.rank, mesh.data.size, (split.start, split.end)),
        packing=config.data.packing,
        seed=train.seed,
        batch_sequences=train.batch_sequences if documents == "train" else config.validation.sequences,
        micro_batch_sequences=train.micro_batch_sequences,
        sequence_tokens=train.sequence_tokens,
        ignored_label=IGNORED_LABEL,
        documents=documents,
    )
