"""Log-likelihoods of tokens given the tokens before them, and greedy continuations, in batches.

The log-softmax is computed in float32 at least, and sums in float64. Batching and the number of copies change results
by no more than rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tost_lm.inference.generation import LanguageModel, continuations, greedy
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.requests import Likelihoods, Request
from tost_lm.model.streaming import TILE_TOKENS, prefill
from tost_lm.ops.cross_entropy import IGNORED_LABEL

BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}
"""Default tokens of a batch. On a CPU, larger batches do not fit its caches."""


@torch.no_grad()  # not inference_mode: training cannot continue with buffers that were created in it
def score_requests(
    model: LanguageModel, requests: Sequence[Request], batch_tokens: int | None = None, ranks: Ranks | None = None
) -> Likelihoods:
    """Score requests in batches of similar length. Prints progress each minute.

    Args:
        model: in evaluation mode.
        requests: in any order.
        batch_tokens: tokens of a batch, which has at least one request; None: BATCH_TOKENS. It changes memory and time,
            not the result.
        ranks: all of them call it with the same requests and get all scores; None: only this one.

    Raises:
        ConfigError: a request is longer than the model's positions.
    """
    ranks = ranks or Ranks()
    sequence_ranks, limit = ranks.mesh.sequence.size if ranks.mesh else 1, model.config.position_limit

    def score(numbers: list[int], longest: int) -> list[tuple[float, bool]]:
        # Sequence ranks get equally many tokens, and so divide an MLP into equally many tiles.
        padded = -(-longest // sequence_ranks) * sequence_ranks
        length = padded if limit is None else max(longest, min(padded, limit))
        return _score_batch(model, [requests[number] for number in numbers], length)

    lengths = [request.inputs for request in requests]
    scores = _in_rounds(model, lengths, batch_tokens, ranks, score)
    nats, is_greedy = zip(*scores, strict=True) if scores else ((), ())
    tokens = [len(request.target) for request in requests]
    return Likelihoods(np.array(nats, np.float64), np.array(tokens, np.int64), np.array(is_greedy, bool))


@torch.no_grad()
def continue_greedily(
    model: LanguageModel,
    prompts: Sequence[np.ndarray],
    tokens: int,
    vocab_size: int,
    batch_tokens: int | None = None,
    ranks: Ranks | None = None,
) -> list[list[int]]:
    """The `tokens` ids that follow each prompt if the most likely id is always chosen; an end of text ends nothing.

    Args:
        prompts: int64 ids, at least one of each.
        vocab_size: ids that the tokenizer has; padding of the vocabulary is never chosen.
        model, batch_tokens, ranks: as in `score_requests`.

    Raises:
        ConfigError: a prompt and its continuation are longer than the model's positions.
    """

    def generate(numbers: list[int], _: int) -> list[list[int]]:
        output = prefill(
            model, torch.from_numpy(np.stack([prompts[number] for number in numbers])).split(TILE_TOKENS, 1)
        )
        ids = continuations(model, output, tokens, lambda logits_BV: greedy(logits_BV[:, :vocab_size]))
        return torch.stack(list(ids), 1).tolist()

    lengths = [len(prompt) for prompt in prompts]
    return _in_rounds(model, lengths, batch_tokens, ranks or Ranks(), generate, equal_lengths=True)


def _in_rounds(
    model: LanguageModel,
    lengths: Sequence[int],
    batch_tokens: int | None,
    ranks: Ranks,
    compute: Callable[[list[int], int], Sequence[Any]],
    equal_lengths: bool = False,
) -> list[Any]:
    """The results of `compute(numbers, longest)` for each item, in order of numbers, on every rank.

    In each round, a copy of the model computes one batch. A copy without items repeats the last one: where ZeRO stage 3
    spreads the weights over ranks, all of them gather each layer together and must compute equally often.
    """
    device = "cpu" if next(model.parameters()).device.type == "cpu" else "cuda"
    rounds = _rounds(lengths, batch_tokens or BATCH_TOKENS[device], ranks.copies, equal_lengths)
    results, done = {}, 0

    def progress() -> str:
        return f"{done:,} of {len(lengths):,} requests scored"

    for numbers in ranks.each(rounds, progress):
        here = numbers[ranks.copy :: ranks.copies] or numbers[-1:]
        results.update(zip(here, compute(here, lengths[numbers[-1]]), strict=True))
        done += len(numbers)
    together = dict(pair for pairs in ranks.gather(list(results.items())) for pair in pairs)
    return [together[number] for number in range(len(lengths))]


def _rounds(lengths: Sequence[int], batch_tokens: int, copies: int, equal_lengths: bool) -> list[list[int]]:
    """Numbers of items in order of length, in groups that fill one batch of each copy after padding."""
    rounds: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[number]
        has_room = rounds and len(rounds[-1]) < copies * max(1, batch_tokens // length)
        if has_room and not (equal_lengths and lengths[rounds[-1][0]] < length):
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
    output = model(_tensor(inputs_BT, device), _tensor(labels_BT, device))
    assert output.nats is not None
    assert output.is_top is not None
    is_counted_BT = torch.from_numpy(labels_BT != IGNORED_LABEL).to(device)
    is_greedy_B = (output.is_top | ~is_counted_BT).all(1)
    return list(zip(output.nats.double().sum(1).tolist(), is_greedy_B.tolist(), strict=True))


def _tensor(ids_BT: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(ids_BT).to(device)
