"""Log-likelihoods of tokens after others: what every protocol of zero-shot evaluation is scored by.

The log-softmax is in float32 at least, sums are in float64, and how requests are batched changes them by no more than
rounding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.parallel.whole import LanguageModel

BATCH_TOKENS = 8192


class Request(NamedTuple):
    """Tokens to be scored, given those before them; int64 ids, at least one of each."""

    context: np.ndarray
    target: np.ndarray

    @property
    def inputs(self) -> int:
        """Tokens that the model reads."""
        return len(self.context) + len(self.target) - 1


class Likelihoods(NamedTuple):
    """Of R requests."""

    nats: np.ndarray
    """−log p of the whole target, float64 [R]."""
    tokens: np.ndarray
    """Of the target, int64 [R]."""
    is_greedy: np.ndarray
    """Whether the model, always taking its most likely token, would go on with the target, bool [R]."""


@torch.inference_mode()
def score_requests(model: LanguageModel, requests: Sequence[Request], batch_tokens: int = BATCH_TOKENS) -> Likelihoods:
    """Score requests, in batches of about one length.

    Args:
        model: in evaluation mode; on several ranks all of them call it.
        requests: in any order.
        batch_tokens: tokens that are read at once, or one request; it changes memory and time, not the result.

    Raises:
        ConfigError: a request passes the model's positions.
    """
    nats, is_greedy = np.zeros(len(requests)), np.zeros(len(requests), dtype=bool)
    for batch in _batches([request.inputs for request in requests], batch_tokens):
        nats[batch], is_greedy[batch] = _score_batch(model, [requests[number] for number in batch])
    return Likelihoods(nats, np.array([len(request.target) for request in requests], dtype=np.int64), is_greedy)


def _batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Numbers of requests by length, as many together as fit when all are filled up to the longest."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[number] <= batch_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def _score_batch(model: LanguageModel, requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray]:
    """Rows are filled up on the right, where a causal model cannot look."""
    longest = max(request.inputs for request in requests)
    inputs_BT = np.zeros((len(requests), longest), dtype=np.int64)
    labels_BT = np.full((len(requests), longest), IGNORED_LABEL, dtype=np.int64)
    for request, inputs, labels in zip(requests, inputs_BT, labels_BT, strict=True):
        inputs[: request.inputs] = np.concatenate([request.context, request.target[:-1]])
        labels[len(request.context) - 1 : request.inputs] = request.target
    device = next(model.parameters()).device
    output = model(_tensor(inputs_BT, device), _tensor(labels_BT, device))
    assert output.nats is not None
    assert output.is_top is not None
    is_counted_BT = torch.from_numpy(labels_BT != IGNORED_LABEL).to(device)
    return output.nats.double().sum(1).cpu().numpy(), (output.is_top | ~is_counted_BT).all(1).cpu().numpy()


def _tensor(ids_BT: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(ids_BT).to(device)
