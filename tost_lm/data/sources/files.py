"""Which files a corpus consists of, in which order, and what each of them is by its ending."""

import glob
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from tost_lm.data.shard_format import FORMAT, MANIFEST
from tost_lm.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Endings of compressed text and JSON, and what pyarrow calls the codec."""
COMPRESSED = (".txt", ".jsonl", ".json")
TABLES = (".parquet", ".arrow")
TAKEN = ".txt, .jsonl, .json (also with .gz or .zst), .parquet, .arrow"
SHARDS_OF_ANY_VERSION = f'"format": "{FORMAT.rpartition(".")[0]}.'.encode()
MANIFEST_HEAD_BYTES = 200


class CorpusFile(NamedTuple):
    """A file of a corpus; `name` is relative to the source, so that it stays when the corpus moves."""

    name: str
    path: Path
    size: int
    mtime_ns: int


def format_of(path: Path) -> str | None:
    """The ending that says how to read a file, compression left out; None: not one of a corpus."""
    ending = path.suffix.lower()
    if ending in COMPRESSIONS:
        ending = Path(path.stem).suffix.lower()
        return ending if ending in COMPRESSED else None
    return ending if ending in COMPRESSED + TABLES else None


def corpus_files(source: str) -> list[CorpusFile]:
    """Every file of a corpus: one, all known ones of a folder, or those that a glob matches; sorted by name.

    Hidden files and folders are left out, and in folders and globs also shard folders and trained tokenizers, so that
    what is made of a corpus may lie in it. Links are followed.

    Raises:
        DataError: there is no such file, none that can be read, or a folder links back to itself.
    """
    path = Path(source)
    try:
        if path.is_dir():
            found = sorted(_known(path))
            if not found:
                raise DataError(f"corpus.source {source}: no file in this folder ends in {TAKEN}")
        elif path.exists():
            found = [(path.name, path)]
        elif _magic(source):
            found = sorted(_matching(source))
        else:
            raise DataError(
                f"corpus.source {source}: no such file or folder; "
                "it takes embedded, a file, a folder, a glob or hub:NAME"
            )
        for _, file in found:
            if format_of(file) is None:
                raise DataError(f"corpus.source {source}: {file} cannot be read; a corpus takes {TAKEN}")
        return [CorpusFile(name, file, (stat := file.stat()).st_size, stat.st_mtime_ns) for name, file in found]
    except OSError as error:
        raise DataError(f"corpus.source {source}: {error.filename}: {error.strerror}") from None


def _known(root: Path) -> Iterator[tuple[str, Path]]:
    """Files below a folder that have a known ending, unsorted."""
    for folder, folders, names in os.walk(root, onerror=_fail, followlinks=True):
        here = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for linked in (here / name for name in folders if (here / name).is_symlink()):
            target = linked.resolve()
            if any(above.resolve().is_relative_to(target) for above in (here, *here.parents)):
                raise DataError(f"{linked}: links back to a folder that it lies in; remove the link")
        if _is_shard_folder(here):
            continue
        for path in (here / name for name in names if not name.startswith(".")):
            if format_of(path) and not _bookkeeping(path, names) and not _is_tokenizer(path):
                yield path.relative_to(root).as_posix(), path


def _bookkeeping(path: Path, beside: list[str]) -> bool:
    """Whether the datasets library wrote this file beside the rows it saved, and no row of them is in it."""
    if path.name == "dataset_dict.json":
        return True
    saved = "state.json" in beside and any(name.endswith(".arrow") for name in beside)
    return saved and (path.name in ("state.json", "dataset_info.json") or path.match("cache-*.arrow"))


def _is_shard_folder(folder: Path) -> bool:
    """Whether build_shards wrote the files of a folder."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    with manifest.open("rb") as file:
        return SHARDS_OF_ANY_VERSION in file.read(MANIFEST_HEAD_BYTES)


def _is_tokenizer(path: Path) -> bool:
    """Whether a file is a model that train_tokenizer wrote, X.model, or the record beside it, X.model.json."""
    model = path.with_suffix("") if path.suffix == ".json" else path
    return model.suffix == ".model" and model.is_file() and model.with_name(f"{model.name}.json").is_file()


def _matching(source: str) -> Iterator[tuple[str, Path]]:
    """Files that a glob matches, unsorted, with names relative to what stands before its first wildcard."""
    matched = [Path(match) for match in glob.glob(source, recursive=True)]
    of_shards = cache(_is_shard_folder)
    files = [path for path in matched if path.is_file() and not of_shards(path.parent) and not _is_tokenizer(path)]
    if not files:
        folders = f"; it matches folders, whose files are {source}/**" if any(map(Path.is_dir, matched)) else ""
        raise DataError(f"corpus.source {source}: no file matches{folders}")
    fixed = Path(*(parts := Path(source).parts)[: next(i for i, part in enumerate(parts) if _magic(part))])
    return ((path.relative_to(fixed).as_posix(), path) for path in files)


def _magic(part: str) -> bool:
    return any(sign in part for sign in "*?[")


def _fail(error: OSError) -> NoReturn:
    raise error
