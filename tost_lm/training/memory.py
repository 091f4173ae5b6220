"""An out-of-memory error in one line: what needs the memory, and which settings reduce it."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tost_lm.errors import TrainingError
from tost_lm.parallel.watchdog.heartbeat import Heartbeat
from tost_lm.training.config import PretrainConfig
from tost_lm.training.plan_activations import activation_bytes_per_token, tokens_in_memory
from tost_lm.training.plan_memory import weights_and_optimizer

TORCH_MESSAGES = ("can't allocate memory", "bad_alloc", "Cannot allocate memory", "out of memory", "ALLOC_FAILED")


@contextmanager
def explain_out_of_memory(config: PretrainConfig, heartbeat: Heartbeat) -> Iterator[None]:
    """Raises TrainingError in place of an out-of-memory error."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not full and not any(text in str(error) for text in TORCH_MESSAGES):
            raise
        where = f"{heartbeat.last.phase}, step {heartbeat.last.step}"
        raise TrainingError(
            f"rank {heartbeat.last.rank} ({socket.gethostname()}) is out of memory ({where}): {_needs(config)}"
        ) from None


def _needs(config: PretrainConfig) -> str:
    model = sum(weights_and_optimizer(config, int(os.environ.get("WORLD_SIZE", "1")))) / 1e9
    kept = activation_bytes_per_token(config) * tokens_in_memory(config) / 1e9
    rows, tokens = config.train.micro_batch_size, config.tile_tokens // config.parallel.sequence
    if model > kept:
        fix = "use a smaller model (model.width, layers, vocab_size, max_positions) or increase parallelism"
    else:
        fix = (
            "lower train.micro_batch_size or memory.tile_tokens, enable memory.activation_checkpointing, or increase "
            "parallelism"
        )
    return (
        f"weights and optimizer take {model:,.2f} GB, and the activations of {rows} × {tokens} tokens {kept:,.2f} GB; "
        f"{fix} (parallel.sequence, parallel.tensor, parallel.zero_stage); tost plan shows all memory"
    )
