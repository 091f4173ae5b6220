"""Records of stages for checkpoints that a test writes by hand."""

from typing import Any

from tost_lm.checkpointing.format import Progress
from tost_lm.data.stages import StageRecord, StageSource
from tost_lm.pretrain.settings import PretrainConfig

FINGERPRINT = "ab" * 32


def recorded(config: PretrainConfig, **changes: Any) -> StageRecord:
    """The record of the first stage of a run on shards of 1,000 tokens."""
    total = sum(config.data.folders.values())
    sources = [
        StageSource(str(folder), FINGERPRINT, weight / total, 1000) for folder, weight in config.data.folders.items()
    ]
    fields = {
        "name": "start", "first_step": 0, "sources": tuple(sources), "seq_len": config.train.seq_len,
        "packing": config.data.packing, "global_batch_size": config.train.global_batch_size,
        "warmup_steps": config.optim.warmup_steps or 0,
        "settings": config.in_stages()[0].what_is_trained(),
    }  # fmt: skip
    return StageRecord(**{**fields, **changes})


def progress(step: int, global_batch_size: int, seq_len: int) -> Progress:
    """The progress of a run of one stage, without its settings."""
    source = StageSource("shards", FINGERPRINT, 1.0, 1000)
    stage = StageRecord("start", 0, (source,), seq_len, "concatenated", global_batch_size)
    return Progress(step, step, stages=(stage,))
