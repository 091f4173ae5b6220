"""The batches of this rank, and the tiles of their rows."""

from collections.abc import Sequence
from typing import Literal

from tost_lm.data.loader import BatchShard, Corpora, TrainingBatches
from tost_lm.data.stages import StageRecord
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.parallel.mesh import Mesh
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.tiled import Tiling, tile


def tiling_of(config: PretrainConfig, mesh: Mesh) -> Tiling:
    """The tiling of a configuration that `with_tile_size` returned.

    Raises:
        ConfigError: a tile has fewer tokens than there are sequence ranks.
    """
    memory = config.memory
    assert memory.tile_tokens != "auto"
    return tile(mesh, config.row_tokens, memory.tile_tokens, states_on_host=memory.offload_tile_states)


def build_batches(
    config: PretrainConfig,
    corpora: Corpora,
    mesh: Mesh,
    tiling: Tiling,
    documents: Literal["train", "valid"] = "train",
    stages: Sequence[StageRecord] = (),
) -> TrainingBatches:
    """This rank's shard of every batch of a run with these stages so far. The held-out split has one batch, number 0.

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
        stages=stages,
    )
