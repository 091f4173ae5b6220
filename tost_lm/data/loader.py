"""The batches of a run: what a rank reads of each training step, a pure function of the step.

Shape suffixes: A micro-batches, B rows of one, L tokens of a row that a rank holds, N samples, S spans.
"""

from itertools import accumulate, chain
from typing import TYPE_CHECKING, Literal, NamedTuple

from tost_lm.data.concatenation import Concatenation
from tost_lm.data.mixture import Corpora, Mixture
from tost_lm.data.packing import PackedSamples
from tost_lm.data.sampler import ConcatenatedSamples, Samples, Spans
from tost_lm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

Packing = Literal["concatenated", "best-fit"]


class Share(NamedTuple):
    """What of a step a rank reads."""

    data_rank: int
    data_ranks: int
    """Each has as many samples of a step, contiguous ones."""
    columns: tuple[tuple[int, int], ...]
    """The tokens [start, end) of every row, some here and some there."""


class Batch(NamedTuple):
    """A rank's share of a step."""

    tokens: "np.ndarray"
    """int32 [A, B, L]."""
    labels: "np.ndarray"
    """What follows each token in its document, or the given id that is not counted; int32 [A, B, L]."""
    document_ends: "np.ndarray"
    """Best-fit: where documents end in the flat rows of all micro-batches, their columns elsewhere included, int64;
    else empty."""


class TrainingBatches:
    """Item `step` is a rank's share of training step `step`: `torch.utils.data.Dataset` without torch.

    Samples are numbered over the run, sample i = step · batch_sequences + j. A concatenated micro-batch has a row for
    each sample; one of packed samples is a single row of all of them, cut into documents.
    """

    def __init__(
        self,
        corpora: Corpora,
        share: Share,
        *,
        packing: Packing,
        seed: int,
        batch_sequences: int,
        micro_batch_sequences: int,
        sequence_tokens: int,
        ignored_label: int,
        documents: Literal["train", "valid"] = "train",
    ) -> None:
        """Raises ConfigError if a corpus is shorter than a sample, DataError if one is damaged."""
        import numpy as np

        shards_of = [one.token_arrays(documents) for one in corpora.shards]
        tokens_of = [sum(map(len, arrays)) for arrays in shards_of]
        for one, tokens in zip(corpora.shards, tokens_of, strict=True):
            if tokens < sequence_tokens:
                raise ConfigError(
                    f"train.sequence_tokens {sequence_tokens}: longer than all {documents} documents in {one.folder}, "
                    f"{tokens} tokens; shorten it to that or add documents"
                )
        filling = np.full(sequence_tokens, corpora.eot)
        self._tokens = Concatenation([*chain(*shards_of), filling])
        self._first_tokens = [0, *accumulate(tokens_of)]  # of each corpus, and of the filling behind them
        self._mixture = Mixture(corpora.weights, seed)
        self._samples: list[Samples] = [
            PackedSamples(one.lengths(documents), sequence_tokens, number, seed)
            if packing == "best-fit"
            else ConcatenatedSamples(tokens, sequence_tokens, number, seed)
            for number, (one, tokens) in enumerate(zip(corpora.shards, tokens_of, strict=True))
        ]
        self._share, self._packed = share, packing == "best-fit"
        self._batch_sequences, self._micro_batch_sequences = batch_sequences, micro_batch_sequences
        self._sequence_tokens = sequence_tokens
        self._end_of_text, self._ignored_label = corpora.eot, ignored_label

    def __getitem__(self, step: int) -> Batch:
        """Raises IndexError for steps before the first."""
        import numpy as np

        if step < 0:
            raise IndexError(f"step {step}")
        samples = self._batch_sequences // self._share.data_ranks
        first = step * self._batch_sequences + self._share.data_rank * samples
        spans = self._spans(np.arange(first, first + samples))
        ends = np.cumsum(spans.length) if self._packed else np.empty(0, dtype=np.int64)

        rows = 1 if self._packed else self._micro_batch_sequences
        row_tokens = self._micro_batch_sequences * self._sequence_tokens // rows
        shape = (samples // self._micro_batch_sequences, rows, -1)
        stripes = [self._read(_within_columns(spans, row_tokens, *columns)) for columns in self._share.columns]
        tokens, labels = (np.concatenate([x.reshape(shape) for x in xs], -1) for xs in zip(*stripes, strict=True))
        return Batch(tokens, labels, ends)

    def _spans(self, sample_N: "np.ndarray") -> Spans:
        """What fills these samples of the run, one after another, as spans of `_tokens`."""
        import numpy as np

        corpus_N, number_N = self._mixture.locate(sample_N)
        parts, places = [], []
        for corpus in np.unique(corpus_N).tolist():
            chosen = np.flatnonzero(corpus_N == corpus)
            spans = self._samples[corpus].spans(number_N[chosen])
            start_S = np.where(spans.start < 0, self._first_tokens[-1], spans.start + self._first_tokens[corpus])
            parts.append(spans._replace(start=start_S))
            places.append(chosen[(np.cumsum(spans.length) - spans.length) // self._sequence_tokens])
        order = np.argsort(np.concatenate(places), kind="stable")
        return Spans(*(np.concatenate(x)[order] for x in zip(*parts, strict=True)))

    def _read(self, spans: Spans) -> "tuple[np.ndarray, np.ndarray]":
        """Tokens and labels, both int32 and flat; nothing else is read from the shards."""
        import numpy as np

        labels = self._tokens.read(spans.start, spans.length, np.int32)
        first_S = np.cumsum(spans.length) - spans.length
        tokens = np.empty_like(labels)
        tokens[1:] = labels[:-1]
        tokens[first_S] = self._end_of_text
        before = spans.start[~spans.fresh] - 1
        tokens[first_S[~spans.fresh]] = self._tokens.read(before, np.ones_like(before), np.int32)
        for span in np.flatnonzero(spans.start >= self._first_tokens[-1]).tolist():
            labels[first_S[span] : first_S[span] + spans.length[span]] = self._ignored_label
        return tokens, labels


def _within_columns(spans: Spans, row_tokens: int, first: int, end: int) -> Spans:
    """The parts of spans that lie in the columns [first, end) of the rows that they fill one after another."""
    import numpy as np

    column_S = (np.cumsum(spans.length) - spans.length) % row_tokens
    before_S = np.maximum(first - column_S, 0)
    length_S = np.minimum(spans.length, end - column_S) - before_S
    here = length_S > 0
    return Spans((spans.start + before_S)[here], length_S[here], (spans.fresh & (before_S == 0))[here])
