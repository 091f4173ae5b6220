"""An out-of-memory error in one line: what asked for the memory, and which options make it less."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tost_lm.errors import TrainingError
from tost_lm.parallel.heartbeat import Heartbeat
from tost_lm.training.config import PretrainConfig
from tost_lm.training.plan_memory import bytes_a_token, tokens_here

TORCH_SAYS = ("can't allocate memory", "bad_alloc", "Cannot allocate memory", "out of memory", "ALLOC_FAILED")


@contextmanager
def telling_what_needs_memory(config: PretrainConfig, heart: Heartbeat) -> Iterator[None]:
    """Raises TrainingError in place of an out-of-memory error."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not full and not any(text in str(error) for text in TORCH_SAYS):
            raise
        where = f"{heart.last.phase}, step {heart.last.step}"
        raise TrainingError(
            f"rank {heart.last.rank} ({socket.gethostname()}) is out of memory ({where}): {_needs(config)}"
        ) from None


def _needs(config: PretrainConfig) -> str:
    rows, tokens = config.train.micro_batch_sequences, config.train.sequence_tokens // config.parallel.sequence
    kept = bytes_a_token(config) * tokens_here(config) / 1e9
    return (
        f"of a micro-batch of {rows} × {tokens} tokens here {kept:.2f} GB are kept for the backward; lower "
        "train.micro_batch_sequences or memory.tile_tokens, compute again (memory.recompute), or share more out: "
        "parallel.sequence, parallel.tensor, parallel.zero_stage; python -m pretrain.plan shows what needs how much"
    )
