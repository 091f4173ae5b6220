"""Corpora: every source becomes one stream of named documents in a fixed order."""

import gzip
import hashlib
import importlib
import itertools
import json
import os
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.data.config import CorpusConfig
from tost_lm.errors import DataError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz")
NOT_EMBEDDED = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "lib2to3",
    "pydoc_data",  # the same text comes as topics
}  # fmt: skip


class Document(NamedTuple):
    """One text of a corpus; `name` is unique within it and decides whether the document is held out."""

    name: str
    text: str


def documents(corpus: CorpusConfig) -> Iterator[Document]:
    """Every document of a corpus that has text, always in the same order.

    Raises:
        DataError: the source is missing, holds no text, or something in it cannot be read; raised while iterating.
    """
    if corpus.source == "embedded":
        found = _embedded()
    elif corpus.source.startswith("hub:"):
        found = _hub_rows(corpus)
    else:
        found = _file_documents(corpus)
    empty = True
    for document in found:
        if not document.text:
            continue
        try:
            document.text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{document.name}: character {error.start} is half of a surrogate pair; mend or remove the document"
            ) from None
        empty = False
        yield document
    if empty:
        raise DataError(f"corpus.source {corpus.source}: holds no text; point it at documents that are not empty")


def fingerprint(corpus: CorpusConfig) -> str:
    """Hex SHA-256 that changes when the corpus does.

    `embedded` is hashed whole; files by relative name, size and time of change; hub datasets by what the datasets
    library identifies a revision with.
    """
    parts: Iterator[tuple[object, ...]]
    if corpus.source == "embedded":
        parts = iter(_embedded())
    elif corpus.source.startswith("hub:"):
        parts = iter([(corpus.source, corpus.text_field, _hub_builder(corpus).hash)])
    else:
        files = [(name, path.stat()) for name, path in _files(corpus)]
        parts = iter([(corpus.text_field,), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)])
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part).encode())
    return digest.hexdigest()


def is_heldout(name: str, share: float) -> bool:
    """Whether the document called `name` belongs to validation; for a given share that depends on the name alone."""
    point = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return point < share


def _embedded() -> Iterator[Document]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        topics = {}
    for key in sorted(topics):
        yield Document(f"topics/{key}", topics[key])
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - NOT_EMBEDDED
        sources += [Path(folder, name) for name in names if name.endswith(".py")]
    if not topics or not sources:
        raise DataError(
            f"{root}: this Python comes without its sources or documentation; use one that has them, "
            "or set corpus.source to text of your own"
        )
    for path in sorted(sources):
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield Document(f"stdlib/{path.relative_to(root).as_posix()}", text)


def _files(corpus: CorpusConfig) -> list[tuple[str, Path]]:
    """Name and path of every file of a corpus of files, sorted by name."""
    source = Path(corpus.source)
    if source.is_dir():
        found = sorted(
            (path.relative_to(source).as_posix(), path)
            for path in source.rglob("*")
            if path.name.endswith(SUFFIXES) and path.is_file()
        )
        if not found:
            raise DataError(f"corpus.source {source}: no .txt, .jsonl or .jsonl.gz file in this folder")
        return found
    if not source.exists():
        raise DataError(
            f"corpus.source {source}: no such file or folder; it takes embedded, a file, a folder or hub:NAME"
        )
    if not source.name.endswith(SUFFIXES):
        raise DataError(f"corpus.source {source}: not a .txt, .jsonl or .jsonl.gz file")
    return [(source.name, source)]


def _file_documents(corpus: CorpusConfig) -> Iterator[Document]:
    for name, path in _files(corpus):
        try:
            if name.endswith(".txt"):
                yield Document(name, path.read_bytes().decode())
            else:
                yield from _json_lines(name, path, corpus.text_field)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: byte {error.start} is not UTF-8; convert the file") from None
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None


def _json_lines(name: str, path: Path, text_field: str) -> Iterator[Document]:
    with gzip.open(path) if name.endswith(".gz") else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError):
                raise DataError(f"{path}, line {number}: not JSON in UTF-8; mend or remove the line") from None
            yield Document(f"{name}:{number}", _field(row, text_field, f"{path}, line {number}"))


def _field(row: Any, name: str, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object")
    if name not in row:
        there = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where}: no field {name!r}; set corpus.text_field to one of the fields there: {there}")
    if not isinstance(row[name], str):
        raise DataError(f"{where}: field {name!r} is {type(row[name]).__name__}, not a string")
    return row[name]


def _hub_builder(corpus: CorpusConfig) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(f"corpus.source {corpus.source}: needs the datasets library: pip install datasets") from None
    try:
        return datasets.load_dataset_builder(corpus.source.removeprefix("hub:"))
    except Exception as error:  # the library raises its own, the hub client's and the network's errors alike
        raise _hub_error(corpus, error) from None


def _hub_rows(corpus: CorpusConfig) -> Iterator[Document]:
    name = corpus.source.removeprefix("hub:")
    builder = _hub_builder(corpus)
    try:
        rows = iter(builder.as_streaming_dataset(split="train"))
    except Exception as error:
        raise _hub_error(corpus, error) from None
    for number in itertools.count():
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise _hub_error(corpus, error) from None
        yield Document(f"{name}:{number}", _field(row, corpus.text_field, f"{corpus.source}, row {number}"))


def _hub_error(corpus: CorpusConfig, error: Exception) -> DataError:
    lines = str(error).strip().splitlines()
    return DataError(f"corpus.source {corpus.source}: cannot be loaded: {lines[0] if lines else type(error).__name__}")
