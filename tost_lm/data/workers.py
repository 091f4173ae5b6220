"""Work in worker processes that end with this one.

They tokenize the blocks of a corpus, and the results are yielded in the order of the corpus.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tost_lm.data.settings import CorpusConfig
from tost_lm.data.shard_format import SPLITS, dtype_for
from tost_lm.data.sources import BadRow, Chats, CorpusBlock, Document, Splitter, parse
from tost_lm.data.sources.chats import Part
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.lossless import first_loss
from tost_lm.errors import DataError
from tost_lm.lifetime import without_interrupts

IN_FLIGHT = 3  # items per worker: keeps workers busy and bounds memory

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Any, Item], Result],
    items: Iterable[Item],
    workers: int,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    died: str,
) -> Generator[tuple[Item, Result], None, None]:
    """Each item with `work(state, item)` from one of `workers` processes, in order; reads a bounded number ahead.

    Each process makes its state once: `make(*args)`. Functions and arguments are pickled.

    Raises:
        DataError: a worker process died, or `make` failed; the message is `died`. Errors of `items` and `work` pass
            through.
    """
    context = multiprocessing.get_context("spawn")  # a forked worker would keep the open files of this process
    pool = ProcessPoolExecutor(workers, context, _start, (make, args))
    in_flight: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            with without_interrupts():  # `submit` starts workers
                in_flight.append((item, pool.submit(_work, work, item)))
            if len(in_flight) > IN_FLIGHT * workers:
                item, result = in_flight.popleft()
                yield item, result.result()
        for item, result in in_flight:
            yield item, result.result()
    except BrokenProcessPool:
        raise DataError(died) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_state: Any = None
"""In a worker process: what `make` returned."""


def _start(make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _state
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # also if it is killed
    _state = make(*args)


def _work(work: Callable[[Any, Item], Result], item: Item) -> Result:
    return work(_state, item)


CHECKED_BYTES = 1_000_000  # of text that each worker decodes again, beside all held-out documents


class Built(NamedTuple):
    """Documents of one block in one split: tokens [Σ lengths]; tokens and bytes of text of each document; and whether
    each token counts in the loss, uint8 [Σ lengths]."""

    tokens: "np.ndarray"
    lengths: "np.ndarray"
    text_bytes: "np.ndarray"
    loss_mask: "np.ndarray"


class Encoded(NamedTuple):
    """A tokenized block."""

    splits: dict[str, Built]
    rows: dict[str, int]
    """As in the manifest."""
    bad: Sequence[BadRow]


def encoded_blocks(
    blocks: Iterable[CorpusBlock],
    corpus: CorpusConfig,
    tokenizer: Tokenizer,
    chats: Chats,
    splitter: Splitter,
    workers: int,
) -> Generator[tuple[CorpusBlock, Encoded], None, None]:
    """Each block with its tokens from one of `workers` processes, in order; reads a bounded number of blocks ahead.

    Raises:
        DataError: a worker process died, or the tokenizer changed a text. Errors of `blocks` pass through.
    """
    died = (
        "a tokenizing process died (killed or out of memory); run the same command to resume, with "
        f"shards.workers={max(1, workers // 2)} to use less memory"
    )
    return in_processes(Encoder.encode, blocks, workers, Encoder, (corpus, tokenizer, chats, splitter), died)


class _EncodedDocument(NamedTuple):
    ids: "np.ndarray"
    text_bytes: int
    loss_mask: "np.ndarray"


class Encoder:
    """In a worker process: tokenizes blocks, and decodes the first texts and those that are scored again."""

    def __init__(self, corpus: CorpusConfig, tokenizer: Tokenizer, chats: Chats, splitter: Splitter) -> None:
        self._corpus, self._tokenizer, self._splitter = corpus, tokenizer, splitter
        self._chats = chats
        self._checked = 0

    def encode(self, block: CorpusBlock) -> Encoded:
        documents_of: dict[str, list[_EncodedDocument]] = {split: [] for split in SPLITS}
        bad, documents = [], 0
        for row in parse(block, self._corpus, self._chats):
            if isinstance(row, BadRow):
                bad.append(row)
                continue
            documents += 1
            split = self._splitter.split_of(row.row, row.text)
            found = self._encode(row.parts or (Part(row.text, True),), row.is_chat)
            if not row.is_chat and (split != "train" or row.parts or self._checked < CHECKED_BYTES):
                self._checked += found.text_bytes
                self._check_lossless(row, found.ids[:-1])
            documents_of[split].append(found)
        splits = {
            split: Built(
                np.concatenate([one.ids for one in found]),
                np.array([len(one.ids) for one in found], np.int32),
                np.array([one.text_bytes for one in found], np.int64),
                np.concatenate([one.loss_mask for one in found]),
            )
            for split, found in documents_of.items()
            if found
        }
        rows = {"read": block.rows, "bad": len(bad), "left_out": block.rows - documents - len(bad)}
        return Encoded(splits, rows, bad)

    def _encode(self, parts: Sequence[Part], is_chat: bool) -> "_EncodedDocument":
        """A document that ends with the end-of-text id. Each part is tokenized as a model reads or writes it: apart."""
        tokenizer, dtype = self._tokenizer, dtype_for(self._tokenizer.vocab_size)
        encode = self._chats.encode if is_chat else tokenizer.encode_array
        space = " " if tokenizer.adds_space else ""  # it puts back the space before a cut
        texts = [parts[0].text, *(part.text.removeprefix(space) for part in parts[1:])]
        arrays = [encode(text).astype(dtype) for text in texts]
        if not len(arrays[-1]) or arrays[-1][-1] != tokenizer.eot:  # a template may write it
            arrays[-1] = np.append(arrays[-1], np.array(tokenizer.eot, dtype))
        loss_mask = np.repeat(np.array([part.counts for part in parts], np.uint8), [*map(len, arrays)])
        return _EncodedDocument(np.concatenate(arrays), sum(len(part.text.encode()) for part in parts), loss_mask)

    def _check_lossless(self, document: Document, ids: "np.ndarray") -> None:
        if loss := first_loss(document.text, self._tokenizer.decode(ids.tolist())):
            raise DataError(
                f"the tokenizer is not lossless: in row {document.row + 1:,} of the corpus {loss}; use a tokenizer "
                "that changes no text"
            )
