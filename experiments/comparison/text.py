"""Measures of a language model's memory on unseen books, in nats per token: the same texts for all models.

Streams are parts of books, of 8,192 tokens; T is the trained length.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tost_lm.data.shards import Shards
from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.softmax.layer import SoftmaxMixer
from tost_lm.model import TostLM

STREAM, STREAMS = 8192, 64
PASSAGE, PASSAGES = 128, 128
NEAR = 64
"""Tokens before a word that are never exchanged."""
RARE = 3
"""A rare word occurs at most so often in the training text."""
DISTANCES = {"64-512": (64, 512), "512-2k": (512, 2048), "2k-8k": (2048, STREAM)}
"""Tokens between a rare word and its last occurrence."""
STEP = 512
"""States of the exchanged book are kept after each multiple of so many tokens."""
WORD = re.compile(r"[^\W\d_]{3,}")


class Occurrence(NamedTuple):
    """A rare word that its stream had before."""

    first: int
    """Its first token."""
    end: int
    distance: int
    """Tokens since the end of its last occurrence."""


@dataclass(frozen=True)
class Texts:
    streams: np.ndarray
    """[STREAMS, STREAM + 1]; the first token is only read."""
    books: list[int]
    """The book of each stream."""
    occurrences: list[list[Occurrence]]
    """Of each stream."""

    @classmethod
    def of(cls, shards: Shards) -> "Texts":
        """Texts of the held-out books of a shard folder."""
        pieces = [shards.tokenizer().decode([one]) for one in range(shards.vocab_size)]
        known = Counter(word for tokens in shards.documents("train") for _, _, word in words(tokens, pieces))
        books = [tokens for tokens in shards.documents("valid") if len(tokens) > STREAM]
        places = [(n, s) for n, book in enumerate(books) for s in range(0, len(book) - STREAM, STREAM)]
        chosen = [places[i] for i in np.linspace(0, len(places) - 1, STREAMS).round().astype(int)]
        streams = np.stack([books[n][start : start + STREAM + 1] for n, start in chosen]).astype(np.int64)
        return cls(streams, [n for n, _ in chosen], [rare_words(stream, pieces, known) for stream in streams])


def words(tokens: np.ndarray, pieces: list[str]) -> Iterator[tuple[int, int, str]]:
    """First token, end and lower-case letters of each word; it has all tokens with one of its letters."""
    parts = [pieces[token] for token in tokens.tolist()]
    end_P = np.array(list(accumulate(map(len, parts))))
    for found in WORD.finditer("".join(parts)):
        first, last = np.searchsorted(end_P, [found.start(), found.end() - 1], "right")
        yield int(first), int(last) + 1, found[0].lower()


def rare_words(stream: np.ndarray, pieces: list[str], known: Counter) -> list[Occurrence]:
    seen, found = {}, []
    for first, end, word in words(stream, pieces):
        if known[word] <= RARE:
            if word in seen and first - seen[word] >= NEAR:
                found.append(Occurrence(first, end, first - seen[word]))
            seen[word] = end
    return found


@torch.inference_mode()
def measures(model: TostLM, texts: Texts, T: int) -> dict[str, Any]:
    """All measures; lists have a number for each stream or passage, so that intervals can be paired.

    - `windows`: the loss of the later half of a stream in windows of T tokens; the only measure of a model with learned
      positions, which reads no longer texts.
    - `loss` of all tokens of the streams, `loss_by_position` of parts between powers of two.
    - `far`: the loss of the later half of a stream, minus that in windows.
    - `copy`: a passage of 128 tokens read again after 128 tokens of another, minus its first reading.
    - `rare`: by distance, the sum over a rare word's tokens; minus the same after another book in place of all but the
      64 tokens before the word. Negative values are what the model gains from the memory of the distant text.
    """
    model.eval()
    rows = torch.from_numpy(texts.streams)
    windows = rows[:, STREAM // 2 :].unfold(1, T + 1, T)
    alone = torch.stack([nats_of(model, of_stream) for of_stream in windows]).flatten(1)
    found: dict[str, Any] = {"books": texts.books, "windows": alone.mean(1).tolist()}
    if model.config.position_limit:
        return found
    nats = losses(model, texts)
    others = rows.flatten()[: len(rows) * STREAM].view(-1, 2 * PASSAGE)[
        :: len(rows) * STREAM // (2 * PASSAGE * PASSAGES)
    ]
    passages, gaps = others[:PASSAGES].split(PASSAGE, 1)
    copied = torch.cat([nats_of(model, part) for part in torch.cat([passages, gaps.roll(1, 0), passages], 1).split(8)])
    copy = copied[:, -PASSAGE + 8 :].mean(1) - copied[:, 7 : PASSAGE - 1].mean(1)
    edges = [0, *(2**power for power in range(6, 14))]
    return found | {
        "loss": nats.mean(1).tolist(),
        "loss_by_position": {f"{b}": float(nats[:, a:b].mean()) for a, b in pairwise(edges)},
        "far": (nats[:, STREAM // 2 :].mean(1) - alone.mean(1)).tolist(),
        "copy": copy.tolist(),
        "rare": gains_of_rare_words(model, texts, nats),
    }


@torch.inference_mode()
def losses(model: TostLM, texts: Texts) -> Tensor:
    """Nats of each token of each stream, [STREAMS, STREAM]."""
    return torch.cat([nats_of(model, row[None]) for row in torch.from_numpy(texts.streams)])


def gains_of_rare_words(model: TostLM, texts: Texts, nats: Tensor) -> dict[str, list[list[float]]]:
    """By distance, for each stream the gains of its words."""
    found: dict[str, list[list[float]]] = {name: [] for name in DISTANCES}
    for number, (stream, occurrences) in enumerate(zip(texts.streams, texts.occurrences, strict=True)):
        other = next(n for n in range(number + 1, number + STREAMS) if texts.books[n % STREAMS] != texts.books[number])
        states, gains = prefix_states(model, texts.streams[other % STREAMS]), defaultdict(list)
        for word in occurrences:
            near = max(1, word.first - NEAR)
            tokens = torch.from_numpy(stream[near - 1 : word.end])[None]
            logits_BTV = model(tokens[:, :-1], state=states[(near - 1) // STEP], output_state=False).logits
            exchanged = cross_entropy(logits_BTV.mT, tokens[:, 1:], reduction="none")[0, word.first - near :].sum()
            name = next(name for name, (low, high) in DISTANCES.items() if low <= word.distance < high)
            gains[name].append(float(nats[number, word.first - 1 : word.end - 1].sum() - exchanged))
        for name in DISTANCES:
            found[name].append(gains[name])
    return found


def prefix_states(model: TostLM, stream: np.ndarray) -> list[Any]:
    """The states of a stream after each multiple of STEP tokens, from 0 on."""
    states: list[Any] = [None]
    for part in torch.from_numpy(stream[:STREAM]).split(STEP):
        states.append(model(part[None], state=states[-1]).state)
    return states


def nats_of(model: TostLM, rows: Tensor) -> Tensor:
    """Nats of the tokens rows[:, 1:]."""
    return cross_entropy(model(rows[:, :-1], output_state=False).logits.mT, rows[:, 1:], reduction="none")


@torch.no_grad()
def without_attention(model: TostLM) -> TostLM | None:
    """A copy whose softmax layers add nothing. None: there are none, or no others."""
    copied = deepcopy(model)
    mixers = [mixer for mixer in copied.modules() if isinstance(mixer, TokenMixer)]
    of_softmax = [mixer for mixer in mixers if isinstance(mixer, SoftmaxMixer)]
    for mixer in of_softmax:
        mixer.out_proj.weight.zero_()
    return copied if 0 < len(of_softmax) < len(mixers) else None
