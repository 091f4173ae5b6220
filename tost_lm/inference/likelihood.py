"""Log-likelihoods of tokens given the tokens before them, in batches.

The log-softmax is computed in float32 at least, and sums in float64. Batching and the number of copies change results
by no more than rounding.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tost_lm.inference.generation import LanguageModel, require_finite
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.requests import Likelihoods, Request
from tost_lm.ops.cross_entropy import IGNORED_LABEL

BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}
"""Default tokens of a batch. On a CPU, larger batches do not fit its caches."""


@torch.no_grad()  # not inference_mode: training cannot continue with buffers that were created in it
def score_requests(
    model: LanguageModel, requests: Sequence[Request], batch_tokens: int | None = None, ranks: Ranks | None = None
) -> Likelihoods:
    """Score requests in batches of similar length. Prints progress each minute.

    In each round, a copy of the model scores one batch. A copy without requests repeats the last one: where ZeRO stage
    3 spreads the weights over ranks, all of them gather each layer together and must compute equally often.

    Args:
        model: in evaluation mode.
        requests: in any order.
        batch_tokens: tokens of a batch, which has at least one request; None: BATCH_TOKENS. It changes memory and time,
            not the result.
        ranks: all of them call it with the same requests and get all scores; None: only this one.

    Raises:
        ConfigError: a request is longer than the model's positions.
        CheckpointError: a score is not finite.
    """
    ranks = ranks or Ranks()
    sequence_ranks, limit = ranks.sequence_ranks, model.config.position_limit
    device = "cpu" if next(model.parameters()).device.type == "cpu" else "cuda"
    lengths = [request.inputs for request in requests]
    rounds, results = _rounds(lengths, batch_tokens or BATCH_TOKENS[device], ranks.copies), {}

    def progress(done: int) -> str:
        return f"{sum(map(len, rounds[:done])):,} of {len(lengths):,} requests scored"

    for numbers in ranks.each(rounds, progress):
        here = numbers[ranks.copy :: ranks.copies] or numbers[-1:]
        longest = lengths[numbers[-1]]
        # Sequence ranks get equally many tokens, and so divide an MLP into equally many tiles.
        padded = -(-longest // sequence_ranks) * sequence_ranks
        length = padded if limit is None else max(longest, min(padded, limit))
        results.update(zip(here, _score_batch(model, [requests[number] for number in here], length), strict=True))
    together = dict(pair for pairs in ranks.gather(list(results.items())) for pair in pairs)
    scores = [together[number] for number in range(len(lengths))]
    nats, is_greedy = zip(*scores, strict=True) if scores else ((), ())
    tokens = [len(request.target) for request in requests]
    return Likelihoods(np.array(nats, np.float64), np.array(tokens, np.int64), np.array(is_greedy, bool))


def _rounds(lengths: Sequence[int], batch_tokens: int, copies: int) -> list[list[int]]:
    """Numbers of requests in order of length, in groups that fill one batch of each copy after padding."""
    rounds: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rounds and len(rounds[-1]) < copies * max(1, batch_tokens // lengths[number]):
            rounds[-1].append(number)
        else:
            rounds.append([number])
    return rounds


def _score_batch(model: LanguageModel, requests: Sequence[Request], length: int) -> list[tuple[float, bool]]:
    """Nats of each request and whether it is greedy; rows are padded on the right, where a causal model cannot look."""
    inputs_BT = np.zeros((len(requests), length), dtype=np.int64)
    labels_BT = np.full((len(requests), length), IGNORED_LABEL, dtype=np.int64)
    for request, inputs, labels in zip(requests, inputs_BT, labels_BT, strict=True):
        inputs[: request.inputs] = np.concatenate([request.context, request.target[:-1]])
        labels[len(request.context) - 1 : request.inputs] = request.target
    device = next(model.parameters()).device
    here_BT, next_BT = (torch.from_numpy(ids_BT).to(device) for ids_BT in (inputs_BT, labels_BT))
    output = model(here_BT, next_BT)
    assert output.nats is not None
    assert output.is_top is not None
    is_counted_BT = torch.from_numpy(labels_BT != IGNORED_LABEL).to(device)
    is_greedy_B = (output.is_top | ~is_counted_BT).all(1)
    nats_B = output.nats.double().sum(1).cpu().numpy()
    require_finite(model, nats_B)
    return list(zip(nats_B.tolist(), is_greedy_B.tolist(), strict=True))
