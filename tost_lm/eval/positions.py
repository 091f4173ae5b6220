"""Protocol `positions`: the loss of a model by position, up to a multiple of its context length."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tost_lm.data.shards import Concatenation, Shards
from tost_lm.errors import DataError
from tost_lm.eval.settings import SequencesConfig
from tost_lm.inference.ranks import Ranks
from tost_lm.model import ModelConfig
from tost_lm.model.streaming import StreamingModel, TokenStream
from tost_lm.ops.positions import position_ends

DEFAULT_TIMES = 16


class Lengths(NamedTuple):
    """Sequence lengths in tokens."""

    trained: int
    """Length of the longest training sequences."""
    read: int
    """Length of the sequences that are read."""
    limit: int | None
    """The model's positions, if they are fewer than `positions.times` asks for; else None."""

    @classmethod
    def of(cls, model: ModelConfig, times: int | None, heldout_tokens: int) -> "Lengths":
        """Lengths for a model and a held-out text. Without `times`, 16, halved until the text has a sequence."""
        wanted = (times or DEFAULT_TIMES) * model.context_length
        while times is None and wanted > model.context_length and wanted >= heldout_tokens:
            wanted //= 2
        limit = model.position_limit
        return cls(model.context_length, *((wanted, None) if limit is None or wanted <= limit else (limit, limit)))

    @property
    def ends(self) -> list[int]:
        """Ends (exclusive) of the position buckets: 8, 16, 32, …, the trained length, and the length read."""
        return sorted({*position_ends(self.read), min(self.trained, self.read)})


class HeldoutText:
    """The held-out documents as packed training reads them: concatenated, each with its end of text."""

    def __init__(self, shards: Shards, settings: SequencesConfig, model: ModelConfig) -> None:
        """Raises DataError when the text is shorter than one sequence."""
        self._text = Concatenation(shards.token_arrays("valid"))
        self.lengths = Lengths.of(model, settings.times, len(self._text))
        self._tokens = self.lengths.read
        self.sequences = min(settings.sequences, (len(self._text) - 1) // self._tokens)
        """Number of sequences, at most `positions.sequences`."""
        if not self.sequences:
            raise DataError(
                f"{shards.folder}: its held-out text has {len(self._text):,} tokens, less than a sequence of "
                f"{self._tokens:,}; lower positions.times, or give more text (heldout.shards=FOLDER)"
            )

    def sequence(self, number: int) -> np.ndarray:
        """The ids of a sequence and the id after it, int64 [S + 1]."""
        return self._text.read(np.array([number * self._tokens]), np.array([self._tokens + 1]), np.int64)


def mean_nats(model: StreamingModel, ids: np.ndarray, ends: Sequence[int], ranks: Ranks | None = None) -> np.ndarray:
    """Mean nats per token of each position bucket of one sequence, float64 [P]. Memory holds only the model's state.

    Args:
        model: in evaluation mode.
        ids: [S + 1]; each id but the first is predicted from all before it.
        ends: ends of the buckets, the last one S.
        ranks: all of one copy of the model call it; None: only this one.
    """
    nats_P, read = np.zeros(len(ends)), 0
    for nats_T in (ranks or Ranks()).each(TokenStream(model, ids)):
        bucket_T = np.searchsorted(ends, np.arange(read, read + len(nats_T)), side="right")
        nats_P += np.bincount(bucket_T, weights=nats_T.numpy(), minlength=len(ends))
        read += len(nats_T)
    return nats_P / np.diff(ends, prepend=0)


def measure(ranks: Ranks, model: StreamingModel, text: HeldoutText, ends: Sequence[int]) -> np.ndarray:
    """`mean_nats` of all sequences, [N, P], on every rank. The copies of the model share the sequences."""
    results, numbers = {}, range(ranks.copy, text.sequences, ranks.copies)
    for number in ranks.each(numbers, lambda: f"{len(results):,} of {len(numbers):,} sequences read"):
        results[number] = mean_nats(model, text.sequence(number), ends, ranks).tolist()
    ranks.wait_for_copies()
    together = {number: nats for pairs in ranks.gather(list(results.items())) for number, nats in pairs}
    return np.array([together[number] for number in range(text.sequences)])


def by_position(nats_NP: np.ndarray, ends: Sequence[int], trained: int) -> list[dict[str, Any]]:
    """A row for each position bucket: its end, mean nats per token, standard error over the sequences (None if there
    is only one), and whether the model was trained on its positions."""
    sequences = len(nats_NP)
    errors = nats_NP.std(0, ddof=1) / sequences**0.5 if sequences > 1 else [None] * len(ends)
    return [
        {
            "end": end,
            "nats_per_token": float(mean),
            "standard_error": None if error is None else float(error),
            "trained": end <= trained,
        }
        for end, mean, error in zip(ends, nats_NP.mean(0), errors, strict=True)
    ]
