"""Tokenizes blocks of a corpus in worker processes and yields the results in the order of the corpus."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tost_lm.data.config import CorpusConfig
from tost_lm.data.shard_format import SPLITS, dtype_for
from tost_lm.data.sources import BadRow, Block, Document, parse
from tost_lm.data.split import Splitter
from tost_lm.data.tokenizers import Tokenizer, read_tokenizer
from tost_lm.errors import DataError

if TYPE_CHECKING:
    import numpy as np

BLOCKS_IN_FLIGHT = 3  # per worker: keeps workers busy and bounds memory
CHECKED_BYTES = 1_000_000  # of text that each worker decodes again
SHOWN = 20  # characters of a text that was changed


class Built(NamedTuple):
    """Documents of one block in one split: tokens [Σ lengths]; tokens and bytes of text of each document."""

    tokens: "np.ndarray"
    lengths: "np.ndarray"
    text_bytes: "np.ndarray"


class Encoded(NamedTuple):
    """A tokenized block."""

    splits: dict[str, Built]
    documents: int
    bad: list[BadRow]


def encoded_blocks(
    blocks: Iterable[Block], corpus: CorpusConfig, tokenizer: Path, splitter: Splitter, workers: int
) -> Generator[tuple[Block, Encoded], None, None]:
    """Each block with its tokens from one of `workers` processes, in order; reads a bounded number of blocks ahead.

    Raises:
        DataError: a worker process died, or the tokenizer changed a text. Errors of `blocks` pass through.
    """
    context = multiprocessing.get_context("spawn")  # a forked worker would keep the reader's open files
    pool = ProcessPoolExecutor(workers, context, _start_worker, (corpus, tokenizer, splitter))
    in_flight: deque[tuple[Block, Future[Encoded]]] = deque()
    try:
        for block in blocks:
            # Only this process handles Ctrl-C; workers that `submit` starts inherit the blocked signal.
            ours = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                in_flight.append((block, pool.submit(_encode, block)))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, ours)
            if len(in_flight) > BLOCKS_IN_FLIGHT * workers:
                block, encoded = in_flight.popleft()
                yield block, encoded.result()
        for block, encoded in in_flight:
            yield block, encoded.result()
    except BrokenProcessPool:
        raise DataError(
            "a tokenizing process died (killed or out of memory); run the same command to resume, with "
            f"shards.workers={max(1, workers // 2)} to use less memory"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_worker: Any = None
"""In a worker process: (CorpusConfig, Tokenizer, Splitter)."""
_checked = 0
"""In a worker process: bytes of text that were decoded again."""


def _start_worker(corpus: CorpusConfig, tokenizer: Path, splitter: Splitter) -> None:
    global _worker
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # also if it is killed
    _worker = (corpus, read_tokenizer(tokenizer), splitter)


def _encode(block: Block) -> Encoded:
    import numpy as np

    global _checked
    corpus, tokenizer, splitter = _worker
    dtype = dtype_for(tokenizer.vocab_size)
    eot = np.array([tokenizer.eot], dtype)
    documents_of: dict[str, list[tuple[np.ndarray, int]]] = {split: [] for split in SPLITS}
    bad, documents = [], 0
    for row in parse(block, corpus):
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        documents += 1
        ids, size = tokenizer.encode_array(row.text).astype(dtype), len(row.text.encode())
        if _checked < CHECKED_BYTES:
            _checked += size
            _check_lossless(tokenizer, row, ids)
        documents_of[splitter.split_of(row.row, row.text)].append((ids, size))
    splits = {
        split: Built(
            np.concatenate([array for ids, _ in found for array in (ids, eot)]),
            np.array([len(ids) + 1 for ids, _ in found], np.int32),
            np.array([size for _, size in found], np.int64),
        )
        for split, found in documents_of.items()
        if found
    }
    return Encoded(splits, documents, bad)


def _check_lossless(tokenizer: Tokenizer, document: Document, ids: "np.ndarray") -> None:
    text, decoded = document.text, tokenizer.decode(ids.tolist())
    if decoded == text:
        return
    equal = sum(1 for _ in takewhile(bool, map(eq, text, decoded)))
    start = max(0, equal - SHOWN // 2)
    raise DataError(
        f"the tokenizer is not lossless: in row {document.row + 1:,} of the corpus it decodes "
        f"{text[start : start + SHOWN]!r} as {decoded[start : start + SHOWN]!r}; use a tokenizer that changes no text"
    )
