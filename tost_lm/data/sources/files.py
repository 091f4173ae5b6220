"""The files of a corpus: their order, and the format of each by its ending."""

import glob
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from tost_lm.data.sources.blocks import CorpusFormat
from tost_lm.data.sources.lines import COMPRESSIONS, JSON_LINES, TEXT
from tost_lm.data.sources.tables import PARQUET
from tost_lm.errors import DataError, listed
from tost_lm.files import regular_file
from tost_lm.remote import RemotePath, as_path, glob_files, list_files

FORMATS = (TEXT, JSON_LINES, PARQUET)
_COMPRESSED, _OTHERS = (
    [ending for one in FORMATS if one.may_be_compressed == choice for ending in one.endings] for choice in (True, False)
)
SUPPORTED = f"{', '.join(_COMPRESSED)} (also with {' or '.join(COMPRESSIONS)}), {' or '.join(_OTHERS)}"


class CorpusFile(NamedTuple):
    """A file of a corpus. `name` is relative to the source, so a corpus that moves keeps its fingerprint."""

    name: str
    path: Path
    size: int
    version: int | str
    """Time of the last change [ns]; at a URL any text that a change changes."""


def format_of(path: Path) -> CorpusFormat | None:
    """The format of a file by its ending; None: a corpus cannot read it."""
    is_compressed = path.suffix.lower() in COMPRESSIONS
    ending = (Path(path.stem) if is_compressed else path).suffix.lower()
    found = next((one for one in FORMATS if ending in one.endings), None)
    return found if found and (found.may_be_compressed or not is_compressed) else None


def corpus_files(source: str) -> list[CorpusFile]:
    """Every file of a corpus, sorted by name: one file, the supported files of a folder, or the matches of a glob.

    Hidden files are ignored, and links are followed.

    Raises:
        DataError: no file, a named file of another format, or a folder that links to a folder that contains it.
    """
    path = as_path(source)
    if isinstance(path, RemotePath):
        return _files_at_url(path, source)
    try:
        if path.is_dir():
            found = sorted((name, file) for name, file in _visible(path) if format_of(file))
            if not found:
                others = left_out_files(source)
                raise DataError(
                    f"corpus.source {source}: no supported file in this folder{others and f' ({others})'}; "
                    f"add files that end in {SUPPORTED}"
                )
        elif path.exists():
            found = [(path.name, path)]
        elif _is_glob(source):
            found = sorted(_matching(source))
        else:
            raise DataError(
                f"corpus.source {source}: no such file or folder; "
                "set it to a file, a folder, a glob, hf://datasets/NAME or embedded"
            )
        for _, file in found:
            if format_of(file) is None:
                raise DataError(f"corpus.source {source}: {file} has no supported format; convert it to {SUPPORTED}")
        return [_described(name, file) for name, file in found]
    except OSError as error:
        raise DataError(f"corpus.source {source}: {error.filename}: {error.strerror}") from None


def _files_at_url(url: RemotePath, source: str) -> list[CorpusFile]:
    """As `corpus_files`, at a URL."""
    files = list_files(url, deep=True)
    is_glob = not files and _is_glob(source)
    if is_glob:
        files = glob_files(url)

    def is_read(path: Path) -> bool:
        is_hidden = any(part.startswith(".") for part in path.parts)
        return not is_hidden and (is_glob or format_of(path) is not None)

    is_named = [*files] == [url.name]
    found = [
        CorpusFile(name, file.url, file.size, file.version)
        for name, file in files.items()
        if is_named or is_read(Path(name))
    ]
    if not found:
        raise DataError(f"corpus.source {source}: no file that ends in {SUPPORTED} there; correct the URL")
    if other := next((file.path for file in found if format_of(file.path) is None), None):
        raise DataError(f"corpus.source {source}: {other} has no supported format; convert it to {SUPPORTED}")
    return found


def _described(name: str, path: Path) -> CorpusFile:
    stat = regular_file(path).stat()
    return CorpusFile(name, path, stat.st_size, stat.st_mtime_ns)


def token_files(source: str) -> list[CorpusFile]:
    """The .idx file and then the .bin file of each pair that Megatron wrote; empty: a source of text.

    The source is PREFIX of PREFIX.idx, or ends in .idx and may be a glob.

    Raises:
        DataError: a .bin file is missing.
    """
    prefix = Path(f"{source}.idx")
    is_prefix = prefix.is_file() and not Path(source).exists()
    indexes = [prefix] if is_prefix else map(Path, glob.glob(source) if source.endswith(".idx") else [])
    try:
        return [_described(path.name, path) for index in sorted(indexes) for path in (index, index.with_suffix(".bin"))]
    except OSError as error:
        raise DataError(f"corpus.source {source}: {error.filename}: {error.strerror}") from None


def left_out_files(source: str) -> str:
    """The files of a folder that a corpus cannot read, by ending: `left out 3 files: 2 .pdf, 1 without ending`.

    Empty if there are none. Hidden files do not count.
    """
    if source == "embedded" or not Path(source).is_dir():
        return ""
    endings = Counter(_ending(path) for _, path in _visible(Path(source)) if not format_of(path))
    counts = sorted((-count, ending) for ending, count in endings.items())
    total = endings.total()
    names = listed(f"{-count:,} {ending}" for count, ending in counts)
    return f"left out {total:,} file{'s' * (total > 1)}: {names}" if total else ""


def _ending(path: Path) -> str:
    suffixes = path.suffixes[-2 if path.suffix.lower() in COMPRESSIONS else -1 :]
    return "".join(suffixes).lower() or "without ending"


def _visible(root: Path) -> Iterator[tuple[str, Path]]:
    """Name and path of the files below a folder, unsorted, without hidden ones."""
    for folder, folders, names in os.walk(root, onerror=_fail, followlinks=True):
        here = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for linked in (here / name for name in folders if (here / name).is_symlink()):
            target = linked.resolve()
            if any(above.resolve().is_relative_to(target) for above in (here, *here.parents)):
                raise DataError(f"{linked}: links to a folder that contains it; remove the link")
        for path in (here / name for name in names if not name.startswith(".")):
            yield path.relative_to(root).as_posix(), path


def _matching(source: str) -> Iterator[tuple[str, Path]]:
    """Files that a glob matches, unsorted; names are relative to the path before its first wildcard."""
    matched = [Path(match) for match in {*glob.glob(source, recursive=True)}]  # with two ** it may repeat them
    files = [path for path in matched if not path.is_dir()]
    if not files:
        only_folders = any(map(Path.is_dir, matched))
        fix = f", only folders; set it to {source}/**" if only_folders else "; correct the pattern"
        raise DataError(f"corpus.source {source}: no file matches{fix}")
    fixed = Path(*(parts := Path(source).parts)[: next(i for i, part in enumerate(parts) if _is_glob(part))])
    return ((path.relative_to(fixed).as_posix(), path) for path in files)


def _is_glob(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _fail(error: OSError) -> NoReturn:
    raise error
