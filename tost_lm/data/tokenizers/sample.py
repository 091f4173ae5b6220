"""The training text of a tokenizer: a uniform sample of the training documents of a corpus."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

import xxhash

from tost_lm.data.config import DataPrepConfig
from tost_lm.data.sources import BadRow, count_rows, parse, read_blocks
from tost_lm.data.sources.messages import too_many_bad
from tost_lm.data.split import Splitter
from tost_lm.errors import DataError

SAMPLE_SEED = 2**63  # differs from the seed of the split's hash for every tokenizer.seed


class Sample(NamedTuple):
    """`texts` in UTF-8, in random order; the numbers of training `documents` and skipped `bad_rows` of the corpus."""

    texts: list[bytes]
    documents: int
    bad_rows: int


def sample_texts(config: DataPrepConfig, report: Callable[[int, int | None], None]) -> Sample:
    """Read a corpus and keep at most `tokenizer.sample_bytes` of the text of its training documents.

    The selection and its order depend on the texts and the seed, not on the order of the corpus. `report` is called
    with the bytes of training text read so far and the estimated total, or None if it is unknown.

    Raises:
        DataError: the corpus cannot be read, has more bad rows than allowed, or has no training document.
    """
    corpus = config.corpus
    splitter = Splitter(corpus, count_rows(corpus) if corpus.split == "nanogpt" else None)
    chosen = _Smallest(config.tokenizer.sample_bytes)
    documents = text_bytes = rows = bad_rows = 0
    first_bad: BadRow | None = None
    for block in read_blocks(corpus):
        for row in parse(block, corpus):
            if isinstance(row, BadRow):
                bad_rows += 1
                first_bad = first_bad or row
            elif splitter.split_of(row.row, row.text) == "train":
                text = row.text.encode()
                chosen.add(xxhash.xxh3_64_intdigest(text, SAMPLE_SEED + config.tokenizer.seed), text)
                documents += 1
                text_bytes += len(text)
        rows = block.end.row
        report(text_bytes, round(text_bytes / block.fraction_read) if block.fraction_read else None)
    if first_bad and bad_rows > corpus.max_bad_fraction * rows:
        raise too_many_bad(first_bad.where, first_bad.reason, bad_rows, rows)
    if not documents:
        raise DataError(
            f"corpus.source {corpus.source}: no training document; add documents or lower corpus.valid_fraction"
        )
    return Sample(chosen.texts(), documents, bad_rows)


class _Smallest:
    """Keeps the texts with the smallest priorities that fit in `most` bytes; the last text is cut."""

    def __init__(self, most: int) -> None:
        self._room = most
        self._kept: list[tuple[int, bytes]] = []  # a heap of (-priority, text); the first is dropped next
        self._dropped: tuple[int, bytes] | None = None  # the smallest that did not fit; larger ones are dropped too

    def add(self, priority: int, text: bytes) -> None:
        entry = (-priority, text)
        if self._dropped is not None and entry <= self._dropped:
            return
        heappush(self._kept, entry)
        self._room -= len(text)
        while self._room < 0:
            self._dropped = heappop(self._kept)
            self._room += len(self._dropped[1])

    def texts(self) -> list[bytes]:
        texts = [text for _, text in sorted(self._kept, reverse=True)]
        if self._dropped is not None:
            texts.append(self._dropped[1][: self._room].decode(errors="ignore").encode())
        return texts
