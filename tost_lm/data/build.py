"""Building a shard folder: one process reads and writes in the order of the corpus, the others tokenize.

The build takes place in a folder beside the one to be made. From time to time it commits: files are brought to disk and
journal.json says how far they reach and where in the corpus to go on. Killed at any point, the next build cuts the
files back to the last commit and goes on; the finished folder is the same, byte for byte, and appears at once.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.data.config import DataPrepConfig
from tost_lm.data.encoding import available_cores, encoded_blocks
from tost_lm.data.journal import JOURNAL, Journal
from tost_lm.data.shard_format import (
    BAD_ROWS,
    FORMAT,
    MANIFEST,
    SPLITS,
    Manifest,
    dtype_for,
    read_manifest,
)
from tost_lm.data.shard_writer import LENGTHS, SplitWriter
from tost_lm.data.sources import count_rows, fingerprint, read_blocks
from tost_lm.data.sources.messages import changed, too_many_bad
from tost_lm.data.split import Splitter
from tost_lm.data.tokenizers import TOKENIZER_FILES, Tokenizer
from tost_lm.errors import DataError
from tost_lm.files import manifest_bytes, publish_folder, replaced_folder, restore_folder, write_rows, write_whole
from tost_lm.version import VERSION

COMMIT_SECONDS = 1.0
EARLY_BAD_ROWS = 100  # so many more than the share allows end the job before its end


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
    folder = config.shards.folder.resolve()  # a link stays one, and what it leads to is replaced
    _check_replaceable(folder)
    aside = building_folder(folder)
    wanted = identity(config, tokenizer)
    try:
        with _locked(folder):
            aside.mkdir(exist_ok=True)
            if not _finished(aside, wanted):
                _build(config, tokenizer, aside, wanted, report)
            manifest = read_manifest(aside)
            _remove(aside, f"*.{LENGTHS}", JOURNAL, ".*.tmp")  # the last: what killed writes left
            publish_folder(aside, folder)
    except BrokenPipeError:
        raise  # of `report`
    except OSError as error:
        raise DataError(
            f"shards.folder {folder}: cannot be written: {error.strerror or error}; make room or mend it, and the same "
            "command goes on"
        ) from None
    return manifest


def identity(config: DataPrepConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides over the tokens of a shard folder, as the manifest records it beside the name of the source."""
    carried_out = {"source", "max_bad_share", "hub_streaming"}
    return {
        "format": FORMAT,
        "tool_version": VERSION,
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
    folder = folder.resolve()
    return folder.with_name(f".{folder.name}.building")


def settle(folder: Path) -> None:
    """Clear up after a build that was killed while it put its folder in place.

    Raises:
        DataError: another process is building it.
    """
    folder = folder.resolve()
    if replaced_folder(folder).exists():
        with _locked(folder):
            restore_folder(folder)


def _build(
    config: DataPrepConfig,
    tokenizer: Tokenizer,
    aside: Path,
    wanted: dict[str, Any],
    report: Callable[[SoFar], None],
) -> None:
    """Read, tokenize and write, from where an earlier build came to, up to the manifest."""
    journal = Journal.read(aside, wanted)
    if journal is None:
        _remove(aside, "*")
        journal = Journal(aside, wanted)
    write_whole(aside / tokenizer.file_name, tokenizer.model_bytes)
    if config.corpus.split == "nanogpt" and journal.corpus_rows is None:
        journal.corpus_rows = count_rows(config.corpus)
    splitter = Splitter(config.corpus, journal.corpus_rows)
    writers = {
        split: SplitWriter(aside, split, wanted["dtype"], config.shards.shard_tokens, journal.splits[split])
        for split in SPLITS
    }

    def progress(share_read: float | None) -> SoFar:
        totals = [sum(writer.total(what) for writer in writers.values()) for what in ("documents", "bytes", "tokens")]
        return SoFar(totals[0], totals[1], totals[2], share_read)

    report(progress(0.0 if journal.position is None else None))
    committed = time.monotonic()
    try:
        with closing(
            encoded_blocks(
                read_blocks(config.corpus, journal.position),
                config.corpus,
                aside / tokenizer.file_name,
                splitter,
                config.shards.workers or available_cores(),
            )
        ) as pairs:
            for block, encoded in pairs:
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
        if fingerprint(config.corpus) != wanted["source_fingerprint"]:
            raise changed(config.corpus)
        journal.commit(writers)
        splits = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()
    _check_splits(config, splits)
    if bad := journal.bad_rows():
        write_rows(aside / BAD_ROWS, bad)
    content = json.dumps({**wanted, "source": config.corpus.source, "rows": journal.rows, "splits": splits})
    write_whole(aside / MANIFEST, manifest_bytes(Manifest.model_validate_json(content).model_dump()))


def _judge_bad_rows(config: DataPrepConfig, journal: Journal, aside: Path, more: int) -> None:
    """Raises DataError when bad rows pass the allowed share of those read so far by `more`."""
    bad, read, share = journal.rows["bad"], journal.rows["read"], config.corpus.max_bad_share
    if bad <= share * read + (more if share else 0):
        return
    rows = journal.bad_rows()
    write_rows(aside / BAD_ROWS, rows)
    raise too_many_bad(rows[0]["where"], rows[0]["reason"], bad, read, f" (some of them in {aside / BAD_ROWS})")


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
def _locked(folder: Path) -> Iterator[None]:
    """Hold a shard folder against other processes that build it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino
        except BlockingIOError:
            alone = False
        except OSError:
            alone = True  # a file system without locks
        if not alone:
            raise DataError(f"shards.folder {folder}: another process is building it; wait for it or stop it")
        yield
        path.unlink()


def _check_replaceable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"shards.folder {folder}: is a file; choose another folder")
    if os.path.ismount(folder):
        raise DataError(f"shards.folder {folder}: is a mount point, which cannot be replaced; choose a folder in it")
    own = {MANIFEST, BAD_ROWS, *TOKENIZER_FILES}
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
