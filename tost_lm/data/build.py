"""Building a shard folder: one process reads and writes in the order of the corpus, the others tokenize.

The build takes place in a folder beside the one to be made. From time to time it commits: files are brought to disk and
journal.json says how far they reach and where in the corpus to go on. Killed at any point, the next build cuts the
files back to the last commit and goes on; the finished folder is the same, byte for byte, and appears at once.
"""

import fcntl
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from tost_lm.data.config import DataPrepConfig
from tost_lm.data.shard_format import (
    BAD_ROWS,
    FORMAT,
    MANIFEST,
    SPLITS,
    Manifest,
    dtype_for,
    manifest_bytes,
    read_manifest,
)
from tost_lm.data.shard_writer import FRESH, LENGTHS, SplitWriter
from tost_lm.data.sources import BadRow, Block, Position, count_rows, fingerprint, parse, read_blocks
from tost_lm.data.split import Splitter
from tost_lm.data.tokenizers import Gpt2Tokenizer, SentencePieceTokenizer, Tokenizer, read_tokenizer
from tost_lm.errors import DataError
from tost_lm.files import publish_folder, write_rows, write_whole
from tost_lm.version import VERSION

if TYPE_CHECKING:
    import numpy as np

COMMIT_SECONDS = 1.0
BLOCKS_IN_FLIGHT = 3  # for each worker: enough that none waits, few enough to bound memory
BAD_ROWS_KEPT = 100
EARLY_BAD_ROWS = 100  # so many more than the share allows end the job before its end
JOURNAL = "journal.json"


class Built(NamedTuple):
    """Documents of one block in one split: tokens [Σ lengths], and tokens and bytes of text of each document."""

    tokens: "np.ndarray"
    lengths: "np.ndarray"
    text_bytes: "np.ndarray"


class Encoded(NamedTuple):
    """What a worker makes of a block."""

    splits: dict[str, Built]
    documents: int
    bad: list[BadRow]


class SoFar(NamedTuple):
    """How far a build is; `share_read` is of the corpus, None where its size is unknown."""

    documents: int
    bytes: int
    tokens: int
    share_read: float | None


def build_shards(
    config: DataPrepConfig, tokenizer: Tokenizer, report: Callable[[SoFar], None] = lambda progress: None
) -> dict[str, Any]:
    """Tokenize a corpus into `config.shards.folder`, replacing shards that are there, and return the manifest.

    A document is one sequence, its tokens and the end-of-text id. What an earlier build of the same corpus, settings
    and tokenizer left unfinished is gone on with. `report` is called with the state at the beginning and after each
    block.

    Raises:
        DataError: the corpus cannot be read, has more bad rows than allowed or leaves a split empty, the folder cannot
            be written or replaced, another process builds it, or a worker was lost. What was built stays for next time.
    """
    folder = config.shards.folder
    _check_replaceable(folder)
    aside = building_folder(folder)
    wanted = identity(config, tokenizer)
    try:
        with _locked(aside):
            if not _finished(aside, wanted):
                _build(config, tokenizer, aside, _Journal.read(aside, wanted), report)
            manifest = read_manifest(aside)
            _remove(aside, f"*.{LENGTHS}", JOURNAL)
            publish_folder(aside, folder)
    except OSError as error:
        raise DataError(
            f"shards.folder {folder}: cannot be written: {error.strerror or error}; make room or mend it, and the same "
            "command goes on"
        ) from None
    return manifest


def identity(config: DataPrepConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides over the bytes of a shard folder, as the manifest records it."""
    carried_out = {"source", "max_bad_share", "hub_streaming"}
    return {
        "format": FORMAT,
        "tool_version": VERSION,
        "source": config.corpus.source,
        "source_fingerprint": fingerprint(config.corpus),
        "settings": {
            **config.corpus.model_dump(mode="json", exclude=carried_out),
            "shard_tokens": config.shards.shard_tokens,
        },
        "tokenizer": {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot},
        "dtype": dtype_for(tokenizer.vocab_size),
    }


def building_folder(folder: Path) -> Path:
    """Where a build of `folder` takes place."""
    return folder.with_name(f".{folder.name}.building")


class _Journal:
    """How far a build is committed: what to go on from, and the counts of rows so far."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path = path
        self.identity: dict[str, Any] = content["identity"]
        self.corpus_rows: int | None = content["corpus_rows"]
        self.position: Position | None = Position(*content["position"]) if content["position"] else None
        self.rows: dict[str, int] = content["rows"]
        self.bad: list[list[Any]] = content["bad"]
        self.splits: dict[str, Any] = content["splits"]

    @classmethod
    def read(cls, aside: Path, wanted: dict[str, Any]) -> "_Journal":
        """The journal of an unfinished build of just this; else a fresh one in an emptied folder."""
        path = aside / JOURNAL
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_bytes())
            if content["identity"] == wanted:
                return cls(path, content)
        _remove(aside, "*")
        rows = {"read": 0, "bad": 0, "left_out": 0}
        fresh = {"corpus_rows": None, "position": None, "rows": rows, "bad": [], "splits": dict.fromkeys(SPLITS, FRESH)}
        return cls(path, {"identity": wanted, **fresh})

    def count(self, block: Block, encoded: Encoded) -> None:
        """Take a block's rows into the counts, and its bad ones into the sample."""
        self.position = block.end
        self.rows["read"] += block.rows
        self.rows["bad"] += len(encoded.bad)
        self.rows["left_out"] += block.rows - encoded.documents - len(encoded.bad)
        if encoded.bad:
            # Those of the smallest hashes are a uniform sample, whatever the number of rows.
            hashed = [
                [xxhash.xxh3_64_hexdigest(str(row.row).encode()), row.row, row.where, row.reason] for row in encoded.bad
            ]
            self.bad = sorted([*self.bad, *hashed])[:BAD_ROWS_KEPT]

    def bad_rows(self) -> list[dict[str, Any]]:
        """The sample, in the order of the corpus."""
        return [{"where": where, "reason": reason} for _, _, where, reason in sorted(self.bad, key=lambda row: row[1])]

    def commit(self, writers: dict[str, SplitWriter]) -> None:
        self.splits = {split: writer.commit() for split, writer in writers.items()}
        content = {name.lstrip("_"): value for name, value in vars(self).items() if name != "_path"}
        write_whole(self._path, json.dumps(content))


def _build(
    config: DataPrepConfig,
    tokenizer: Tokenizer,
    aside: Path,
    journal: _Journal,
    report: Callable[[SoFar], None],
) -> None:
    """Read, tokenize and write from where the journal is, up to the manifest."""
    write_whole(aside / tokenizer.file_name, tokenizer.model_bytes)
    if config.corpus.split == "nanogpt" and journal.corpus_rows is None:
        journal.corpus_rows = count_rows(config.corpus)
    splitter = Splitter(config.corpus, journal.corpus_rows)
    writers = {
        split: SplitWriter(aside, split, journal.identity["dtype"], config.shards.shard_tokens, journal.splits[split])
        for split in SPLITS
    }

    def progress(share_read: float | None) -> SoFar:
        totals = [sum(writer.total(what) for writer in writers.values()) for what in ("documents", "bytes", "tokens")]
        return SoFar(totals[0], totals[1], totals[2], share_read)

    report(progress(0.0 if journal.position is None else None))
    committed = time.monotonic()
    try:
        with _workers(config, aside / tokenizer.file_name, splitter) as pool:
            for block, encoded in _in_order(pool, read_blocks(config.corpus, journal.position), config.shards.workers):
                for split, built in encoded.splits.items():
                    writers[split].add(*built)
                journal.count(block, encoded)
                _judge_bad_rows(config, journal, aside, EARLY_BAD_ROWS)
                report(progress(block.share_read))
                if time.monotonic() - committed > COMMIT_SECONDS:
                    journal.commit(writers)
                    committed = time.monotonic()
        _judge_bad_rows(config, journal, aside, 0)
        if journal.corpus_rows not in (None, journal.rows["read"]):
            raise DataError(
                f"corpus.source {config.corpus.source}: has {journal.rows['read']} rows where {journal.corpus_rows} "
                "were expected, and split nanogpt is drawn over them; read a hub dataset with hub_streaming=false"
            )
        journal.commit(writers)
        splits = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()
    _check_splits(config, splits)
    if journal.bad:
        write_rows(aside / BAD_ROWS, journal.bad_rows())
    content = json.dumps({**journal.identity, "rows": journal.rows, "splits": splits})
    write_whole(aside / MANIFEST, manifest_bytes(Manifest.model_validate_json(content).model_dump()))


@contextmanager
def _workers(config: DataPrepConfig, tokenizer: Path, splitter: Splitter) -> Iterator[ProcessPoolExecutor]:
    count = worker_count(config.shards.workers)
    pool = ProcessPoolExecutor(
        count,
        multiprocessing.get_context("spawn"),  # a fork would hold on to the reader's open files
        _start_worker,
        (config, tokenizer, splitter),
    )
    try:
        yield pool
    except BrokenProcessPool:
        raise DataError(
            "a tokenizing process was lost (killed, or out of memory); the same command goes on, and "
            f"shards.workers={max(1, count // 2)} takes less memory"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def worker_count(workers: int | None) -> int:
    """So many processes tokenize: the cores that this process may use unless set."""
    return workers or len(os.sched_getaffinity(0))


def _in_order(
    pool: ProcessPoolExecutor, blocks: Iterator[Block], workers: int | None
) -> Iterator[tuple[Block, Encoded]]:
    """Each block with what a worker made of it, in the order of the corpus and a bounded number ahead."""
    in_flight: deque[tuple[Block, Future[Encoded]]] = deque()
    for block in blocks:
        in_flight.append((block, pool.submit(_encode, block)))
        if len(in_flight) > BLOCKS_IN_FLIGHT * worker_count(workers):
            block, encoded = in_flight.popleft()
            yield block, encoded.result()
    for block, encoded in in_flight:
        yield block, encoded.result()


_worker: Any = None
"""In a tokenizing process: its settings, tokenizer and splitter."""


def _start_worker(config: DataPrepConfig, tokenizer: Path, splitter: Splitter) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process' to answer
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # it may be killed
    _worker = (config.corpus, read_tokenizer(tokenizer), splitter)


def _encode(block: Block) -> Encoded:
    import numpy as np

    corpus, tokenizer, splitter = _worker
    dtype = dtype_for(tokenizer.vocab_size)
    eot = np.array([tokenizer.eot], dtype)
    parts: dict[str, list[tuple[np.ndarray, int]]] = {split: [] for split in SPLITS}
    bad, documents = [], 0
    for row in parse(block, corpus):
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        documents += 1
        ids = tokenizer.encode_array(row.text).astype(dtype)
        parts[splitter.split_of(row.row, row.text)].append((ids, len(row.text.encode())))
    splits = {
        split: Built(
            np.concatenate([piece for ids, _ in part for piece in (ids, eot)]),
            np.array([len(ids) + 1 for ids, _ in part], np.int32),
            np.array([size for _, size in part], np.int64),
        )
        for split, part in parts.items()
        if part
    }
    return Encoded(splits, documents, bad)


def _judge_bad_rows(config: DataPrepConfig, journal: _Journal, aside: Path, more: int) -> None:
    """Raises DataError when bad rows pass the allowed share of those read so far by `more`."""
    bad, read, share = journal.rows["bad"], journal.rows["read"], config.corpus.max_bad_share
    if bad <= share * read + (more if share else 0):
        return
    rows = journal.bad_rows()
    write_rows(aside / BAD_ROWS, rows)
    raise DataError(
        f"{rows[0]['where']}: {rows[0]['reason']}; {bad} of {read} rows cannot be read (some of them in "
        f"{aside / BAD_ROWS}): mend them, or allow more with corpus.max_bad_share"
    )


def _check_splits(config: DataPrepConfig, splits: dict[str, Any]) -> None:
    corpus = config.corpus
    shares = {"valid": corpus.valid_share, "test": corpus.test_share} if corpus.split == "hash" else {}
    wanted = ["train", *(split for split, share in shares.items() if share)]
    if not any(splits[split]["documents"] for split in SPLITS):
        raise DataError(f"corpus.source {corpus.source}: holds no text; point it at documents that are not empty")
    for split in wanted:
        if not splits[split]["documents"]:
            change = "lower corpus.valid_share" if split == "train" else f"raise corpus.{split}_share"
            raise DataError(f"no document is left for the {split} split: {change}, or add documents")


def _finished(aside: Path, wanted: dict[str, Any]) -> bool:
    """Whether an earlier build of just this came to its end and was only not put in place."""
    try:
        manifest = read_manifest(aside)
    except DataError:
        return False
    return all(manifest[key] == value for key, value in wanted.items())


@contextmanager
def _locked(aside: Path) -> Iterator[None]:
    """Make the building folder and hold it against other processes."""
    aside.mkdir(parents=True, exist_ok=True)
    path = aside.with_suffix(".lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{aside}: another process is building there; wait for it or stop it") from None
        yield
        path.unlink()


def _check_replaceable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"shards.folder {folder}: is a file; choose another folder")
    own = {MANIFEST, BAD_ROWS, Gpt2Tokenizer.file_name, SentencePieceTokenizer.file_name}
    foreign = [
        path.name
        for path in (folder.iterdir() if folder.exists() else [])
        if path.name not in own and not (path.stem.partition("_")[0] in SPLITS and path.suffix in (".bin", ".idx"))
    ]
    if foreign:
        raise DataError(
            f"shards.folder {folder}: holds other files ({foreign[0]}), and a build replaces it; choose another folder"
        )


def _remove(folder: Path, *patterns: str) -> None:
    for path in {path for pattern in patterns for path in folder.glob(pattern)}:
        path.unlink()
