"""Building a shard folder: one process reads and writes in the order of the corpus, the others tokenize.

The build writes to a temporary folder. About once a second it commits: it flushes the files to disk and records their
sizes and the position in the corpus in journal.json. After a kill at any point, the next build truncates the files to
the last commit and resumes. The finished folder has the same bytes and appears atomically.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.shard_format import (
    BAD_ROWS,
    FORMAT,
    FRESH,
    LENGTHS,
    LOSS_MASK,
    MANIFEST,
    SPLITS,
    Manifest,
    SplitWriter,
    dtype_for,
    read_manifest,
)
from tost_lm.data.shards import Shards
from tost_lm.data.sources import (
    CHAT_FILES,
    Chats,
    CorpusBlock,
    Position,
    Splitter,
    count_rows,
    fingerprint,
    read_blocks,
    token_files,
)
from tost_lm.data.sources.blocks import corpus_changed, too_many_bad
from tost_lm.data.tokenizers import TOKENIZER_FILES, Tokenizer, tokenizer_folder
from tost_lm.data.workers import Encoded, available_cores, encoded_blocks
from tost_lm.data_prep.linked import link_tokens
from tost_lm.data_prep.partitions import link_partitions, partition_of
from tost_lm.errors import DataError
from tost_lm.files import (
    backup_folder,
    manifest_bytes,
    open_lock,
    publish_folder,
    regular_file,
    restore_backup,
    sha256_bytes,
    write_atomically,
    write_rows,
)
from tost_lm.version import VERSION

JOURNAL = "journal.json"
SHARD_FILES = (".bin", ".idx", f".{LOSS_MASK}")
BAD_ROWS_KEPT = 100


@dataclass
class Journal:
    """The position to resume from, and the counts of rows so far."""

    identity: dict[str, Any]
    """Of the build."""
    corpus_rows: int | None = None
    """Counted before the build, if the split needs it."""
    position: Position | None = None
    """Where to resume reading the corpus; None: at its beginning."""
    rows: dict[str, int] = field(default_factory=lambda: {"read": 0, "bad": 0, "left_out": 0})
    splits: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(SPLITS, FRESH))
    """The last commit of each split's writer."""
    bad: list[dict[str, str]] = field(default_factory=list)
    """The first bad rows, BAD_ROWS_KEPT at most."""

    @classmethod
    def read(cls, folder: Path, identity: dict[str, Any]) -> "Journal":
        """The journal in a folder; a new one if it is missing, damaged or of another identity."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(regular_file(folder / JOURNAL).read_bytes())
            if content["identity"] == identity:
                return cls(**{**content, "position": Position(*content["position"])})
        return cls(identity)

    def count(self, block: CorpusBlock, encoded: Encoded) -> None:
        """Add the rows of a block to the counts, and its bad rows to the first ones."""
        self.position = block.end
        self.rows = {what: number + encoded.rows.get(what, 0) for what, number in self.rows.items()}
        bad = [{"where": row.where, "reason": row.reason} for row in encoded.bad]
        self.bad = [*self.bad, *bad][:BAD_ROWS_KEPT]

    def commit(self, folder: Path, writers: dict[str, SplitWriter]) -> None:
        """Flush the shards to disk, then record their sizes in a folder."""
        self.splits = {split: writer.commit() for split, writer in writers.items()}
        write_atomically(folder / JOURNAL, json.dumps(vars(self)))


COMMIT_SECONDS = 1.0
EARLY_BAD_ROWS = 100  # bad rows above the allowed fraction that end a build before it has read the whole corpus


class BuildProgress(NamedTuple):
    """Totals of a build so far; `fraction_read` of the corpus is None if its size is unknown."""

    documents: int
    bytes: int
    tokens: int
    fraction_read: float | None


def build_shards(
    config: DataPrepConfig,
    tokenizer: Tokenizer,
    report: Callable[[BuildProgress], None] = lambda _: None,
    partitions: Sequence[Shards] = (),
) -> dict[str, Any]:
    """Tokenize a corpus into `config.shards.folder`, replacing existing shards, and return the manifest.

    A document is stored as its tokens and the end-of-text id; token files of Megatron are linked. An unfinished build
    of the same corpus, settings and tokenizer is resumed. `report` is called at the start and after each block. The
    shards of all `partitions` are linked in place of reading the corpus.

    Raises:
        DataError: the corpus cannot be read, has more bad rows than allowed or leaves a split empty; the folder cannot
            be written or replaced; another process builds it; or a worker process died. The next build resumes.
    """
    folder = config.shards.folder.resolve()  # replaces the target of a link, not the link
    _check_replaceable(folder)
    temp = building_folder(folder)
    wanted = identity(config, tokenizer)
    try:
        with _locked(folder):
            temp.mkdir(exist_ok=True)
            if not _finished(temp, wanted):
                if partitions or token_files(config.corpus.source):
                    _remove(temp, "*")
                    write_atomically(temp / tokenizer.file_name, tokenizer.model_bytes)
                    linked = _link_all(config, partitions, temp) if partitions else link_tokens(config, temp)
                    _finish(config, temp, wanted | linked)
                else:
                    _build(config, tokenizer, temp, wanted, report)
            manifest = read_manifest(temp)
            _remove(temp, f"*.{LENGTHS}", JOURNAL, ".*.tmp")  # .tmp: from killed writes
            publish_folder(temp, folder)
    except BrokenPipeError:
        raise  # from `report`
    except OSError as error:
        raise DataError(
            f"shards.folder {folder}: cannot be written: {error.strerror or error}; free space or correct the path "
            "and its permissions, then run the same command to resume"
        ) from None
    return manifest


def identity(config: DataPrepConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything that determines the tokens of a shard folder, as recorded in the manifest."""
    without_effect = {"source", "max_bad_fraction"}
    partition, folder = config.shards.partition, tokenizer_folder(config)
    return {
        "format": FORMAT,
        "tool_version": VERSION,
        "source_fingerprint": fingerprint(config.corpus),
        "settings": {
            **config.corpus.model_dump(mode="json", exclude=without_effect),
            "shard_tokens": config.shards.shard_tokens,
            **({"partition": partition} if partition else {}),
        },
        "tokenizer": {
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "eot": tokenizer.eot,
            **({"chat_template": _hash_of_template(folder)} if folder else {}),
        },
        "dtype": dtype_for(tokenizer.vocab_size),
    }


def _hash_of_template(folder: Path) -> str:
    """Hex SHA-256 of all that a chat template and its variables are read from."""
    files = (folder / name for name in CHAT_FILES)
    return sha256_bytes(b"\0".join(file.read_bytes() if file.is_file() else b"" for file in files))


def building_folder(folder: Path) -> Path:
    """The temporary folder of a build of `folder`."""
    folder = folder.resolve()
    return folder.with_name(f".{folder.name}.building")


def recover_folder(folder: Path) -> None:
    """Restore or finish a folder whose build was killed while it replaced the old folder.

    Raises:
        DataError: another process is building it.
    """
    folder = folder.resolve()
    if backup_folder(folder).exists():
        with _locked(folder):
            restore_backup(folder)


def _build(
    config: DataPrepConfig,
    tokenizer: Tokenizer,
    temp: Path,
    wanted: dict[str, Any],
    report: Callable[[BuildProgress], None],
) -> None:
    """Read, tokenize and write up to the manifest; resumes from the journal of an earlier build."""
    journal = Journal.read(temp, wanted)
    if journal.position is None:
        _remove(temp, "*")
    write_atomically(temp / tokenizer.file_name, tokenizer.model_bytes)
    if config.corpus.split == "nanogpt" and journal.corpus_rows is None:
        journal.corpus_rows = count_rows(config.corpus)
    splitter = Splitter(config.corpus, journal.corpus_rows)
    writers = {
        split: SplitWriter(temp, split, wanted["dtype"], config.shards.shard_tokens, journal.splits[split])
        for split in SPLITS
    }

    def progress(fraction_read: float | None) -> BuildProgress:
        totals = [sum(writer.total(what) for writer in writers.values()) for what in ("documents", "bytes", "tokens")]
        return BuildProgress(totals[0], totals[1], totals[2], fraction_read)

    begin = progress(0.0 if journal.position is None else None)
    if begin.documents:
        print(f"resuming after {begin.documents:,} documents, {begin.tokens:,} tokens", flush=True)
    report(begin)
    committed = time.monotonic()
    try:
        read = encoded_blocks(
            read_blocks(config.corpus, journal.position, partition=partition_of(config) or (0, 1)),
            config.corpus,
            tokenizer,
            Chats(tokenizer_folder(config)),
            splitter,
            config.shards.workers or available_cores(),
        )
        with closing(read) as pairs:
            for block, encoded in pairs:
                for split, built in encoded.splits.items():
                    writers[split].add(*built)
                journal.count(block, encoded)
                _check_bad_rows(config, journal.rows, journal.bad, temp, EARLY_BAD_ROWS)
                report(progress(block.fraction_read))
                if time.monotonic() - committed > COMMIT_SECONDS:
                    journal.commit(temp, writers)
                    committed = time.monotonic()
        more = EARLY_BAD_ROWS if config.shards.partition else 0
        _check_bad_rows(config, journal.rows, journal.bad, temp, more)
        if fingerprint(config.corpus) != wanted["source_fingerprint"]:
            raise corpus_changed(config.corpus)
        journal.commit(temp, writers)
        splits = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()
    if journal.bad:
        write_rows(temp / BAD_ROWS, journal.bad)
    _finish(config, temp, {**wanted, "rows": journal.rows, "splits": splits})


def _link_all(config: DataPrepConfig, partitions: Sequence[Shards], temp: Path) -> dict[str, Any]:
    """As `link_partitions`, with their first bad rows."""
    linked = link_partitions(partitions, temp)
    bad = [row for one in partitions for row in one.bad_rows()][:BAD_ROWS_KEPT]
    _check_bad_rows(config, linked["rows"], bad, temp, 0)
    if bad:
        write_rows(temp / BAD_ROWS, bad)
    return linked


def _finish(config: DataPrepConfig, temp: Path, content: dict[str, Any]) -> None:
    """Check the splits and write the manifest."""
    if not config.shards.partition:
        _check_splits(config, content["splits"])
    manifest = Manifest.model_validate_json(json.dumps({**content, "source": config.corpus.source}))
    write_atomically(temp / MANIFEST, manifest_bytes(manifest.model_dump(exclude_unset=True)))


def _check_bad_rows(
    config: DataPrepConfig, rows: dict[str, int], first_bad: list[dict[str, str]], temp: Path, more: int
) -> None:
    """Raises DataError if the bad rows exceed the allowed fraction of the rows read so far by `more`."""
    bad, read, fraction = rows["bad"], rows["read"], config.corpus.max_bad_fraction
    if bad <= fraction * read + (more if fraction else 0):
        return
    write_rows(temp / BAD_ROWS, first_bad)
    first = first_bad[0]
    raise too_many_bad(first["where"], first["reason"], bad, read, f" (the first: {temp / BAD_ROWS})")


def _check_splits(config: DataPrepConfig, splits: dict[str, Any]) -> None:
    corpus = config.corpus
    fractions = {"valid": corpus.valid_fraction, "test": corpus.test_fraction} if corpus.split == "hash" else {}
    wanted = ["train", *(split for split, fraction in fractions.items() if fraction)]
    if not any(splits[split]["documents"] for split in SPLITS):
        raise DataError(f"corpus.source {corpus.source}: no text in any document; set it to documents with text")
    for split in wanted:
        if not splits[split]["documents"]:
            change = "lower corpus.valid_fraction" if split == "train" else f"raise corpus.{split}_fraction"
            raise DataError(
                f"no document in the {split} split; {change}, add documents, or divide text files with "
                "corpus.text_documents=line"
            )


def _finished(temp: Path, wanted: dict[str, Any]) -> bool:
    """Whether an earlier build with this identity finished but was not published."""
    try:
        manifest = read_manifest(temp)
    except DataError:
        return False
    return all(manifest[key] == value for key, value in wanted.items())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a shard folder, so that one process at a time builds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    with open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino
        except BlockingIOError:
            alone = False
        except OSError:
            alone = True  # a file system without locks
        if not alone:
            raise DataError(f"shards.folder {folder}: another process is building it; wait for that process or stop it")
        yield
        path.unlink()


def _check_replaceable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"shards.folder {folder}: is a file; choose another folder")
    if os.path.ismount(folder):
        raise DataError(f"shards.folder {folder}: is a mount point and cannot be replaced; choose a folder inside it")
    own = {MANIFEST, BAD_ROWS, *TOKENIZER_FILES}
    foreign = [
        path.name
        for path in (folder.iterdir() if folder.exists() else [])
        if path.name not in own
        and not (re.fullmatch(rf"({'|'.join(SPLITS)})_\d{{5,}}", path.stem) and path.suffix in SHARD_FILES)
    ]
    if foreign:
        raise DataError(
            f"shards.folder {folder}: contains other files ({foreign[0]}), which a build would delete; "
            "choose another folder"
        )


def _remove(folder: Path, *patterns: str) -> None:
    for path in {path for pattern in patterns for path in folder.glob(pattern)}:
        path.unlink()
