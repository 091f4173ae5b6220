"""Corpora: each is read as blocks of rows in a fixed order, which worker processes parse into documents.

A corpus as a whole has a fingerprint and a number of rows, and each of its documents a split. The embedded corpus is
the documentation and sources of the running Python.
"""

import hashlib
import importlib
import json
import math
import os
import sysconfig
import tokenize
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from tost_lm.data.settings import CorpusConfig
from tost_lm.data.sources.blocks import (
    BLOCK_BYTES,
    BadRow,
    CorpusBlock,
    Document,
    Position,
    Source,
    SourceBlock,
    parse,
)
from tost_lm.data.sources.chats import CHAT_FILES, Chats
from tost_lm.data.sources.files import CorpusFile, corpus_files, format_of, left_out_files, token_files
from tost_lm.errors import ConfigError, DataError, first_line, printable

__all__ = [
    "CHAT_FILES",
    "BadRow",
    "Chats",
    "CorpusBlock",
    "Document",
    "Position",
    "count_rows",
    "fingerprint",
    "left_out_files",
    "parse",
    "read_blocks",
    "token_files",
]

DOCUMENT_SETTINGS = (
    "text_field", "text_documents", "normalization", "min_characters", "max_characters",
)  # fmt: skip


def read_blocks(
    corpus: CorpusConfig,
    start: Position | None = None,
    block_bytes: int = BLOCK_BYTES,
    partition: tuple[int, int] = (0, 1),
) -> Iterator[CorpusBlock]:
    """Blocks of about `block_bytes`, from the beginning or from the end of an earlier block. Deterministic.

    Of partition i of n, it reads only the files whose middle is in the i-th of n equal ranges of the corpus' bytes.

    Raises:
        DataError: the source is missing, holds no rows, or a file cannot be read; raised while iterating.
    """
    sources = _sources(corpus)
    number, count = partition
    ends = list(accumulate(source.size for source in sources))
    middles = [2 * end - source.size for end, source in zip(ends, sources, strict=True)]
    begin, stop = (bisect_left(middles, 2 * ends[-1] * edge / count) for edge in (number, number + 1))
    sources = sources[: stop if number + 1 < count else None]
    first, offset, row, line = start or Position(begin, 0, 0, 0)
    before, total = (sum(source.size for source in some) for some in (sources[begin:first], sources[begin:]))
    for file, source in enumerate(sources[first:], start=first):
        blocks = _read(source, offset, block_bytes)
        block = next(blocks, None)
        while block is not None:
            following = next(blocks, None)
            first_row, first_line = row, line + (source.kind != "arrow")
            row, line = row + block.rows, line + block.lines
            end, consumed = Position(file, block.offset, row, line), block.consumed
            if following is None:
                end, consumed = Position(file + 1, 0, row, 0), source.size
            fraction = min(1.0, (before + consumed) / max(1, total))
            yield CorpusBlock(
                source.kind, block.payload, source.where, first_row, block.rows, first_line, end, fraction
            )
            block = following
        offset, line, before = 0, 0, before + source.size
    if not row and count == 1:
        raise DataError(f"corpus.source {corpus.source}: no rows; set it to files with documents")


def count_rows(corpus: CorpusConfig) -> int:
    """Number of rows of a corpus, bad and empty ones included; texts are not parsed.

    Raises:
        DataError: the source is missing or a file cannot be read.
    """
    return sum(block.rows for source in _sources(corpus) for block in _read(source, 0, BLOCK_BYTES))


def fingerprint(corpus: CorpusConfig) -> str:
    """Hex SHA-256 that changes when the documents of a corpus change; the split does not affect it.

    `embedded` is hashed by content; files by relative name, size and modification time, at a URL by what changes with
    them.

    Raises:
        DataError: the source is missing.
    """
    settings = {name: getattr(corpus, name) for name in DOCUMENT_SETTINGS}
    if corpus.source == "embedded":
        contents = list(embedded_texts())
    else:
        contents = [
            (file.name, file.size, file.version) for file in token_files(corpus.source) or corpus_files(corpus.source)
        ]
    digest = hashlib.sha256()
    for content in (settings, *contents):
        digest.update(json.dumps(content).encode())
    return digest.hexdigest()


def _sources(corpus: CorpusConfig) -> list[Source]:
    if corpus.source == "embedded":
        rows = [json.dumps({corpus.text_field: text}).encode() for text in embedded_texts()]
        return [Source("lines", partial(_blocks_of_rows, rows), "embedded", len(rows))]
    return [_file_source(file, corpus) for file in corpus_files(corpus.source)]


def _file_source(file: CorpusFile, corpus: CorpusConfig) -> Source:
    form = format_of(file.path)
    assert form is not None  # corpus_files refuses others
    blocks = partial(form.blocks, file.path, file.size, corpus)
    return Source(form.kind, blocks, printable(str(file.path)), file.size)


def _blocks_of_rows(rows: list[bytes], first: int, block_bytes: int) -> Iterator[SourceBlock]:
    """Blocks of JSON lines from single rows, from row `first`."""
    while first < len(rows):
        sizes = accumulate(len(row) + 1 for row in rows[first:])
        count = next((n for n, size in enumerate(sizes, start=1) if size >= block_bytes), len(rows) - first)
        lines, first = rows[first : first + count], first + count
        yield SourceBlock(b"\n".join(lines), count, count, first, first)


def _read(source: Source, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """The blocks of a source; a failure to read it becomes one line."""
    try:
        yield from source.blocks(offset, block_bytes)
    except ImportError as error:
        raise DataError(
            f"{source.where}: cannot be read without the package {error.name}: pip install {error.name}"
        ) from None
    except (OSError, ValueError, NotImplementedError, RecursionError) as error:  # pyarrow and json raise these
        raise DataError(
            f"{source.where}: cannot be read: {first_line(error)}; correct, replace or remove the file"
        ) from None


NOT_EMBEDDED = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "lib2to3",
    "pydoc_data",  # read as topics
}  # fmt: skip


def embedded_texts() -> Iterator[str]:
    """Every document, always in the same order.

    Raises:
        DataError: this Python has no sources or documentation; raised while iterating.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        topics = {}
    for key in sorted(topics):
        yield topics[key]
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - NOT_EMBEDDED
        sources += [Path(folder, name) for name in names if name.endswith(".py")]
    if not topics or not sources:
        raise DataError(
            f"corpus.source embedded: no sources or documentation of Python in {root}; use another Python, or set "
            "corpus.source to your own text"
        )
    for path in sorted(sources):
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield text


NANOGPT_FRACTION = 0.0005
NANOGPT_SEED = 2357


class Splitter:
    """Assigns the documents of a corpus to splits; picklable.

    With `hash` the split depends on the text alone: equal texts are in one split, added documents move no other, and a
    larger held-out fraction takes documents from train only. With `nanogpt` it depends on the row number.
    """

    def __init__(self, corpus: CorpusConfig, rows: int | None):
        """`rows`: number of rows in the corpus, bad and empty ones included; `hash` does not need it.

        Raises:
            ConfigError: too few rows for split `nanogpt`.
            DataError: split `nanogpt` without the package datasets.
        """
        self._valid_rows: frozenset[int] | None = None
        if corpus.split == "nanogpt":
            assert rows is not None
            self._valid_rows = _nanogpt_rows(rows)
        # integers, because a hash near 2**64 becomes 1.0 as a float
        self._valid_below = math.ceil(corpus.valid_fraction * 2**64)
        self._test_from = 2**64 - math.ceil(corpus.test_fraction * 2**64)

    def split_of(self, row: int, text: str) -> Literal["train", "valid", "test"]:
        """The split of the document in row `row` of the corpus."""
        if self._valid_rows is not None:
            return "valid" if row in self._valid_rows else "train"
        point = xxhash.xxh3_64_intdigest(text.encode())
        if point < self._valid_below:
            return "valid"
        return "test" if point >= self._test_from else "train"


def _nanogpt_rows(rows: int) -> frozenset[int]:
    """The validation rows of nanoGPT, drawn by `datasets.Dataset.train_test_split` as nanoGPT calls it."""
    if rows < 2:
        raise ConfigError(f"corpus.split nanogpt: too few rows to divide: {rows}; set corpus.split=hash")
    try:
        import datasets
    except ImportError:
        raise DataError("corpus.split nanogpt: needs the package datasets: pip install datasets") from None
    import pyarrow

    numbers = datasets.Dataset(pyarrow.table({"row": np.arange(rows)}), fingerprint=f"rows-{rows}")
    sides = numbers.train_test_split(test_size=NANOGPT_FRACTION, seed=NANOGPT_SEED, shuffle=True, keep_in_memory=True)
    return frozenset(sides["test"]["row"])
