"""Log-likelihoods of tokens given the tokens before them, and greedy continuations, in batches; and the held-out score,
protocol `heldout@bpb`: every token of every document predicted exactly once.

The log-softmax is computed in float32 at least, and sums in float64. Batching and the number of copies change results
by no more than rounding.

A held-out document is read as [EOT] + its tokens, in disjoint windows. The first input of a window is the last token of
the window before it. EOT is only an input and is not scored.

Byte n-gram baselines are trained on the same training text and scored on the same held-out bytes: unigram, bigram and
trigram, interpolated by Witten-Bell smoothing (Witten and Bell 1991; in the form of Chen and Goodman 1998, section
2.4). With c the counts and T(h) the number of distinct bytes seen after the context h:
    P(b | h) = (c(h b) + T(h) · P(b | shorter h)) / (c(h) + T(h)),   below the unigram: 1/256 for every byte.
Contexts do not cross documents, so the first bytes of a document have shorter contexts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost_lm.inference.generation import LanguageModel, continuations, greedy
from tost_lm.inference.ranks import Ranks
from tost_lm.model.streaming import TILE_TOKENS, prefill
from tost_lm.ops.cross_entropy import IGNORED_LABEL

BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}
"""Default tokens of a batch. On a CPU, larger batches do not fit its caches."""


class Request(NamedTuple):
    """Tokens to score, given those before them; int64 ids, at least one of each."""

    context: np.ndarray
    target: np.ndarray

    @property
    def inputs(self) -> int:
        """Tokens that the model reads."""
        return len(self.context) + len(self.target) - 1


class Likelihoods(NamedTuple):
    """Scores of R requests."""

    nats: np.ndarray
    """−log p of the whole target, float64 [R]."""
    tokens: np.ndarray
    """Tokens of the target, int64 [R]."""
    is_greedy: np.ndarray
    """Whether each token of the target is the most likely one, bool [R]."""


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


def disjoint_windows(ids: np.ndarray, first: int, window: int, *, fill_last: bool = False) -> Iterator[Request]:
    """Each token once, in windows of `window` targets.

    The first window's context is the id `first`, that of others the token before them. With `fill_last` the last
    window gets as much context as fits.
    """
    ids = np.concatenate([[first], ids]).astype(np.int64)
    for start in range(1, len(ids), window):
        end = min(start + window, len(ids))
        begin = max(0, end - 1 - window) if fill_last else start - 1
        yield Request(ids[begin:start], ids[start:end])


def strided_windows(ids: np.ndarray, window: int, stride: int) -> Iterator[Request]:
    """Windows that begin `stride` tokens apart; each scores the tokens that the windows before it did not.

    As in Hugging Face's guide to perplexity, a window has no context before its first token. The first token of the
    text is not scored, and with `stride` = `window` neither is that of any window.
    """
    ids, scored = ids.astype(np.int64), 0
    for start in range(0, len(ids), stride):
        end, scored = min(start + window, len(ids)), max(scored, start + 1)
        if scored < end:
            yield Request(ids[start:scored], ids[scored:end])
        if end == len(ids):
            return
        scored = end


def left_truncated(ids: np.ndarray, begin: int, window: int) -> Request:
    """The tokens from `begin` on, with as much context as the window holds, at least one token."""
    return Request(ids[min(max(0, len(ids) - 1 - window), begin - 1) : begin], ids[begin:])


BOOTSTRAP_RESAMPLES = 1000


@dataclass(frozen=True)
class DocumentScores:
    """Scores of documents, in their order: summed nats (float64), tokens and bytes (int64), each [documents]."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray

    def totals(self) -> dict[str, Any]:
        """Nats per token, perplexity and bits per byte, with their denominators and a standard error."""
        return {
            "documents": len(self.nats),
            **rates(float(self.nats.sum()), int(self.tokens.sum()), int(self.bytes.sum())),
            "bits_per_byte_standard_error": bootstrap_error(self.nats / math.log(2), self.bytes),
        }

    def against(self, name: str, baseline_bits: np.ndarray) -> dict[str, Any]:
        """Bits per byte of a baseline (`baseline_bits`: of each document), and by how much the model's are lower.

        The difference has its own standard error, since the same documents are hard for both.
        """
        advantage = baseline_bits - self.nats / math.log(2)
        return {
            "name": name,
            "bits_per_byte": float(baseline_bits.sum() / self.bytes.sum()),
            "model_lower_by": float(advantage.sum() / self.bytes.sum()),
            "model_lower_by_standard_error": bootstrap_error(advantage, self.bytes),
        }


def score_documents(
    model: LanguageModel,
    documents: Sequence[np.ndarray],
    sizes: Sequence[int],
    eot: int,
    window: int,
    batch_tokens: int | None = None,
    ranks: Ranks | None = None,
) -> DocumentScores:
    """Score documents (ids without EOT; `sizes`: bytes of their text) in windows of `window` tokens, with a model in
    evaluation mode."""
    requests = [
        (number, request)
        for number, tokens in enumerate(documents)
        for request in disjoint_windows(tokens, eot, window)
    ]
    scores = score_requests(model, [request for _, request in requests], batch_tokens, ranks)
    nats = np.zeros(len(documents))
    np.add.at(nats, [number for number, _ in requests], scores.nats)
    counts = np.array([len(tokens) for tokens in documents], dtype=np.int64)
    return DocumentScores(nats, counts, np.array(sizes, dtype=np.int64))


def rates(nats: float, tokens: int, size: int) -> dict[str, Any]:
    """Nats per token, perplexity, and bits per byte Σ nats / (ln 2 · Σ bytes), with their denominators."""
    return {
        "tokens": tokens,
        "bytes": size,
        "nats": nats,
        "nats_per_token": nats / tokens,
        "perplexity_per_token": math.exp(nats / tokens) if nats / tokens < 700 else math.inf,
        "bits_per_byte": nats / (math.log(2) * size),
    }


def bootstrap_error(bits: np.ndarray, sizes: np.ndarray) -> float:
    """Bootstrap standard error of Σ bits / Σ bytes over documents, with a fixed seed."""
    draws = np.random.default_rng(0)
    ratios = np.empty(BOOTSTRAP_RESAMPLES)
    for i in range(BOOTSTRAP_RESAMPLES):
        drawn = draws.integers(0, len(bits), len(bits))
        ratios[i] = bits[drawn].sum() / sizes[drawn].sum()
    return float(ratios.std(ddof=1))


ORDERS = (1, 2, 3)
BASELINES = ("byte unigram", "byte bigram", "byte trigram")
TILE_BYTES = 1 << 22  # bounds the memory beside the tables to a few dozen times this


class ByteNgrams:
    """Counts of byte n-grams, `tables[n]` [256**n], and counts and distinct bytes after each context.

    The trigram table takes 128 MB, and twice that while counting.
    """

    def __init__(self, documents: Iterable[bytes]):
        self.bytes = 0
        """Number of bytes counted."""
        self.tables = {order: np.zeros(256**order, dtype=np.int64) for order in ORDERS}
        for text, place in _tiles(documents):
            self.bytes += int((place >= 0).sum())
            for order in ORDERS:
                self.tables[order] += np.bincount(_keys(text, order)[place >= order - 1], minlength=256**order)
        followers = {order: self.tables[order].reshape(-1, 256) for order in ORDERS}
        self.context_counts = {order: table.sum(axis=1) for order, table in followers.items()}
        self.context_kinds = {order: np.count_nonzero(table, axis=1) for order, table in followers.items()}

    def probabilities(self, document: bytes) -> np.ndarray:
        """P of each byte of a document given those before it, by order: float64 [3, bytes]."""
        text = np.frombuffer(document, dtype=np.uint8).astype(np.int64)
        lower = np.full(len(text), 1 / 256)
        rows = []
        for order in ORDERS:
            row = lower.copy()
            keys = _keys(text, order)[order - 1 :]
            contexts = keys >> 8
            kinds = self.context_kinds[order][contexts]
            seen = self.context_counts[order][contexts] + kinds
            shorter = lower[order - 1 :]
            interpolated = (self.tables[order][keys] + kinds * shorter) / np.maximum(seen, 1)
            row[order - 1 :] = np.where(seen > 0, interpolated, shorter)
            rows.append(row)
            lower = row
        return np.stack(rows)

    def bits(self, documents: Sequence[bytes]) -> np.ndarray:
        """Summed bits of each document under each order, in the order of BASELINES: float64 [3, documents]."""
        rows = [-np.log2(self.probabilities(document)).sum(axis=1) for document in documents]
        return np.stack(rows, axis=1)


def first_bytes(documents: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The first `size` bytes of the documents."""
    for document in documents:
        yield document[:size]
        size -= len(document)
        if size <= 0:
            return


def _keys(text: np.ndarray, order: int) -> np.ndarray:
    """The n-gram that ends at each byte, as one number; the first order − 1 are invalid."""
    keys = text.copy()
    for back in range(1, order):
        keys[back:] += text[:-back] << (8 * back)
    return keys


def _tiles(documents: Iterable[bytes]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Text in tiles of bounded size: bytes as int64, and the index of each in its document (−1: already counted).

    The next tile continues a longer document and repeats its last two bytes as context.
    """
    held: list[np.ndarray] = []
    places: list[np.ndarray] = []
    size = 0
    for document in documents:
        text = np.frombuffer(document, dtype=np.uint8)
        for start in range(0, len(text), TILE_BYTES):
            context = min(start, 2)
            held.append(text[start - context : start + TILE_BYTES])
            place = np.arange(start - context, min(start + TILE_BYTES, len(text)))
            place[:context] = -1
            places.append(place)
            size += len(place)
            if size >= TILE_BYTES:
                yield np.concatenate(held).astype(np.int64), np.concatenate(places)
                held, places, size = [], [], 0
    if held:
        yield np.concatenate(held).astype(np.int64), np.concatenate(places)
