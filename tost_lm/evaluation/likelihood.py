"""Log-likelihoods of tokens after others: what every protocol of zero-shot evaluation is scored by.

The log-softmax is in float32 at least, sums are in float64, and how requests are batched, or shared out to copies of
the model, changes them by no more than rounding.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.evaluation.ranks import Ranks
from tost_lm.ops.cross_entropy import IGNORED_LABEL

BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}
"""Tokens that are read at once unless said otherwise: on a CPU no more than its caches do with."""
TELL_EVERY_S = 60.0


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


@torch.no_grad()  # not inference_mode: training could not go on with buffers that were made in it
def score_requests(
    model: LanguageModel, requests: Sequence[Request], batch_tokens: int | None = None, ranks: Ranks | None = None
) -> Likelihoods:
    """Score requests, in batches of about one length. Prints how far it is each minute.

    Args:
        model: in evaluation mode.
        requests: in any order.
        batch_tokens: tokens that are read at once, or one request; None: BATCH_TOKENS. It changes memory and time, not
            the result.
        ranks: all of them call it with the same requests, and get all scores; None: this one alone.

    Raises:
        ConfigError: a request passes the model's positions.
    """
    ranks = ranks or Ranks()
    batch_tokens = batch_tokens or BATCH_TOKENS["cpu" if next(model.parameters()).device.type == "cpu" else "cuda"]
    rounds = _rounds([request.inputs for request in requests], batch_tokens, ranks.copies)
    mine = _shares(rounds, ranks)
    mine_in_order, found, told = [number for share in mine for number in share], [], time.monotonic()
    for share, numbers in zip(mine, rounds, strict=True):
        ranks.beat()
        length = _alike_on_ranks(requests[numbers[-1]].inputs, ranks, model.config.position_limit)
        found.append(_score_batch(model, [requests[number] for number in share], length))
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            print(f"{sum(len(nats) for nats, _ in found):,} of {len(mine_in_order):,} requests scored", flush=True)
    parts = [np.concatenate(part).tolist() for part in zip(*found, strict=True)] if found else [[], []]
    nats, is_greedy = np.zeros(len(requests)), np.zeros(len(requests), dtype=bool)
    for numbers, *scores in ranks.gather((mine_in_order, *parts)):
        nats[numbers], is_greedy[numbers] = scores
    return Likelihoods(nats, np.array([len(request.target) for request in requests], dtype=np.int64), is_greedy)


def _rounds(lengths: Sequence[int], batch_tokens: int, copies: int) -> list[list[int]]:
    """Numbers of requests by length, as many together as all copies read at once when filled up to the longest."""
    rounds: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rounds and len(rounds[-1]) < copies * max(1, batch_tokens // lengths[number]):
            rounds[-1].append(number)
        else:
            rounds.append([number])
    return rounds


def _shares(rounds: list[list[int]], ranks: Ranks) -> list[list[int]]:
    """What this rank's copy of the model reads in each round.

    A copy that nothing is left for reads the last request again: where ZeRO stage 3 spreads the weights over ranks,
    all of them go through the same layers, and as often, for they gather each one together.
    """
    return [numbers[ranks.copy :: ranks.copies] or numbers[-1:] for numbers in rounds]


def _alike_on_ranks(length: int, ranks: Ranks, limit: int | None) -> int:
    """A length with as many tokens for each sequence rank, which so take an MLP in as many portions; at most `limit`,
    the model's positions."""
    parts = ranks.mesh.sequence.size if ranks.mesh else 1
    filled_up = -(-length // parts) * parts
    return filled_up if limit is None else max(length, min(filled_up, limit))


def _score_batch(model: LanguageModel, requests: Sequence[Request], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows are filled up to `length` tokens on the right, where a causal model cannot look."""
    inputs_BT = np.zeros((len(requests), length), dtype=np.int64)
    labels_BT = np.full((len(requests), length), IGNORED_LABEL, dtype=np.int64)
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
