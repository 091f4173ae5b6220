"""The texts that a tokenizer is trained on: a uniform sample of a corpus' training documents."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

import xxhash

from tost_lm.data.config import DataPrepConfig
from tost_lm.data.sources import BadRow, count_rows, parse, read_blocks
from tost_lm.data.sources.messages import too_many_bad
from tost_lm.data.split import Splitter
from tost_lm.errors import DataError

OTHER_THAN_SPLIT = 2**63  # so that no seed gives the hash by which documents are split


class Sample(NamedTuple):
    """`texts` in UTF-8, in random order; `documents` they are taken from; `bad_rows` of the corpus, left out."""

    texts: list[bytes]
    documents: int
    bad_rows: int


def sample_texts(config: DataPrepConfig, report: Callable[[int, int | None], None]) -> Sample:
    """Read a corpus and keep at most `tokenizer.sample_bytes` of its training documents' text.

    Which texts are kept, and in which order, depends on the texts and the seed, not on the order of the corpus.
    `report` is called with the bytes of training text read and, where it can be told, about how many there are.

    Raises:
        DataError: no training document is there, or the corpus cannot be read, or more than `corpus.max_bad_share` of
            its rows.
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
                chosen.add(xxhash.xxh3_64_intdigest(text, OTHER_THAN_SPLIT + config.tokenizer.seed), text)
                documents += 1
                text_bytes += len(text)
        rows = block.end.row
        report(text_bytes, round(text_bytes / block.share_read) if block.share_read else None)
    if first_bad and bad_rows > corpus.max_bad_share * rows:
        raise too_many_bad(first_bad.where, first_bad.reason, bad_rows, rows)
    if not documents:
        raise DataError(
            f"corpus.source {corpus.source}: no training document; lower corpus.valid_share or add documents"
        )
    return Sample(chosen.texts(), documents, bad_rows)


class _Smallest:
    """Of all texts added those with the smallest priorities, as many as fit in `most` bytes, the last one cut."""

    def __init__(self, most: int) -> None:
        self._room = most
        self._kept: list[tuple[int, bytes]] = []  # a heap, (-priority, text): the next to go comes first
        self._gone: tuple[int, bytes] | None = None  # the smallest that did not fit; nothing after it may be kept

    def add(self, priority: int, text: bytes) -> None:
        entry = (-priority, text)
        if self._gone is not None and entry <= self._gone:
            return
        heappush(self._kept, entry)
        self._room -= len(text)
        while self._room < 0:
            self._gone = heappop(self._kept)
            self._room += len(self._gone[1])

    def texts(self) -> list[bytes]:
        texts = [text for _, text in sorted(self._kept, reverse=True)]
        if self._gone is not None:
            texts.append(self._gone[1][: self._room].decode(errors="ignore").encode())
        return texts
