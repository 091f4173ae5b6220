"""Training of an encoder on documents: masked tokens of documents, then their classes.

Shapes: B = 1 row of packed documents, M tokens, N documents, C channels, V ids.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tost_lm.evaluation.lra import LraPretrainConfig
from tost_lm.evaluation.lra.tasks import Split
from tost_lm.evaluation.small_models import Result, fit
from tost_lm.model.encoder import Encoder
from tost_lm.optim import OptimConfig

PRETRAINING, TRAINING = 0, 1
"""Random streams of a seed."""


def train(model: Encoder, split: Split, optim: OptimConfig, steps: int, batch_size: int, seed: int) -> None:
    """Train the classes of documents. Raises TrainingError when the loss is not finite."""
    batches = _batches(len(split.labels), batch_size, np.random.default_rng((seed, TRAINING)))

    def loss_of(_step: int) -> Tensor:
        return cross_entropy(*_logits_and_labels(model, split, next(batches)))

    fit(model, optim, steps, loss_of)


def pretrain(
    model: Encoder, split: Split, optim: OptimConfig, config: LraPretrainConfig, batch_size: int, seed: int
) -> None:
    """Train the encoder to predict masked tokens from the others; the layer that predicts is dropped.

    A masked token is the last id of the embedding. Raises TrainingError when the loss is not finite.
    """
    assert model.config.vocab_size
    mask_id = model.config.vocab_size - 1
    draws = np.random.default_rng((seed, PRETRAINING))
    batches = _batches(len(split.documents), batch_size, draws)
    head = nn.Linear(model.config.width, mask_id).to(_device(model))

    def loss_of(_step: int) -> Tensor:
        ids_BM, cu_seqlens = _pack(model, [split.documents[i] for i in next(batches)])
        masked = torch.from_numpy(draws.random(ids_BM.shape) < config.masked_fraction).to(ids_BM.device)
        masked[0, int(draws.integers(ids_BM.shape[1]))] = True  # at least one
        features_BMC, _ = model.encode(ids_BM.masked_fill(masked, mask_id), cu_seqlens)
        return cross_entropy(head(features_BMC[masked]), ids_BM[masked])

    fit(nn.ModuleList([model, head]), optim, config.steps, loss_of)


@torch.inference_mode()
def evaluate(model: Encoder, split: Split, batch_size: int) -> Result:
    """Accuracy, and its standard error over examples."""
    right, count = [], len(split.labels)
    for start in range(0, count, batch_size):
        logits, labels = _logits_and_labels(model, split, np.arange(start, min(count, start + batch_size)))
        right.append((logits.argmax(-1) == labels).double())
    right_N = torch.cat(right)
    return {
        "accuracy": float(right_N.mean()),
        "accuracy_standard_error": float(right_N.std()) / math.sqrt(count),
    }


def _batches(count: int, batch_size: int, draws: np.random.Generator) -> Iterator[np.ndarray]:
    """Numbers of examples, epoch after epoch in new orders; incomplete batches are left out."""
    size = min(batch_size, count)
    while True:
        order = draws.permutation(count)
        yield from order[: count - count % size].reshape(-1, size)


def _logits_and_labels(model: Encoder, split: Split, examples: np.ndarray) -> tuple[Tensor, Tensor]:
    towers = model.config.towers
    documents = [split.documents[towers * i + tower] for i in examples for tower in range(towers)]
    logits_NV = model(*_pack(model, documents)).float()
    return logits_NV, torch.from_numpy(split.labels[examples]).to(logits_NV.device)


def _pack(model: Encoder, documents: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """One row of documents [1, M] on the model's device, and their offsets on the host."""
    ids_BM = torch.from_numpy(np.concatenate(documents))[None].long().to(_device(model))
    return ids_BM, torch.tensor([0, *map(len, documents)]).cumsum(0)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
