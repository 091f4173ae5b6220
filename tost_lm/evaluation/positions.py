"""The loss by position far beyond the trained length, of held-out text that is read as one stream (protocol positions).

Shape suffixes: S tokens of a sequence, N sequences, P stretches of positions.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tost_lm.config import read_toml
from tost_lm.data.concatenation import Concatenation
from tost_lm.data.shards import Shards
from tost_lm.errors import DataError
from tost_lm.evaluation.positions_config import SequencesConfig
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.subject import Subject
from tost_lm.model import ModelConfig
from tost_lm.model.positions import position_ends
from tost_lm.model.streaming import Reader, TokenStream

TELL_EVERY_S = 60.0


class Lengths(NamedTuple):
    """Of the sequences that are read, in tokens."""

    trained: int
    """The model was trained on sequences of so many."""
    read: int
    limit: int | None
    """The model reads no more, though more is asked for; None: as many as are asked for."""

    @classmethod
    def of(cls, subject: Subject, model: ModelConfig, times: int) -> "Lengths":
        """Of a checkpoint; it was trained on what its run's config.toml says, without one on model.max_positions."""
        recorded = subject.home / "config.toml"
        trained = read_toml(recorded)["train"]["sequence_tokens"] if recorded.is_file() else model.max_positions
        wanted, limit = times * model.max_positions, model.position_limit
        return cls(trained, wanted, None) if limit is None or wanted <= limit else cls(trained, limit, limit)

    @property
    def ends(self) -> list[int]:
        """Where stretches of positions end, each before its number: 8, 16, 32, …, the length, and the trained one."""
        return sorted({*position_ends(self.read), min(self.trained, self.read)})


class HeldoutText:
    """Held-out documents one after another, each with its end of text, as packed training reads them."""

    def __init__(self, shards: Shards, settings: SequencesConfig, lengths: Lengths) -> None:
        """Raises DataError when there is not one whole sequence."""
        self._text, self._tokens = Concatenation(shards.token_arrays("valid")), lengths.read
        self.sequences = min(settings.sequences, (len(self._text) - 1) // self._tokens)
        """How many there are of those that are wanted."""
        if not self.sequences:
            raise DataError(
                f"{shards.folder}: its held-out text has {len(self._text):,} tokens, and a sequence of "
                f"{self._tokens:,} is wanted: lower positions.times, or give more text (heldout.shards=FOLDER)"
            )

    def sequence(self, number: int) -> np.ndarray:
        """The ids of one, and the one that follows it, int64 [S + 1]."""
        return self._text.read(np.array([number * self._tokens]), np.array([self._tokens + 1]), np.int64)


def mean_nats(model: Reader, ids: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """Nats per token of each stretch of positions of one sequence, float64 [P]; its state is all that is held of it.

    Args:
        model: in evaluation mode; on several ranks all of one copy call it.
        ids: [S + 1]; each but the first is predicted from all before it, at the position of the one before it.
        ends: of the stretches, the last at S.
    """
    nats_P, read = np.zeros(len(ends)), 0
    for piece in TokenStream(model, ids):
        stretch = np.searchsorted(ends, np.arange(read, read + len(piece)), side="right")
        nats_P += np.bincount(stretch, weights=piece.numpy(), minlength=len(ends))
        read += len(piece)
    return nats_P / np.diff(ends, prepend=0)


def measure(ranks: Ranks, model: Reader, text: HeldoutText, ends: Sequence[int]) -> np.ndarray:
    """`mean_nats` of all sequences, [N, P], on every rank; copies of the model share them. Prints how far it is."""
    found, told = {}, time.monotonic()
    mine = range(ranks.copy, text.sequences, ranks.copies)
    for number in mine:
        found[number] = mean_nats(model, text.sequence(number), ends).tolist()
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            print(f"{len(found):,} of {len(mine):,} sequences read", flush=True)
    together = {number: nats for pairs in ranks.gather(list(found.items())) for number, nats in pairs}
    return np.array([together[number] for number in range(text.sequences)])


def by_position(nats_NP: np.ndarray, ends: Sequence[int], trained: int) -> list[dict[str, Any]]:
    """A row for each stretch of positions: where it ends, mean nats per token, their standard error over the sequences
    (None of a single one), and whether the model was trained on positions so far."""
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
