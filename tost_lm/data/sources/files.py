"""The files of a corpus: their order, and the format of each by its ending.

Files of JSON lines and plain text are cut into blocks at line ends without parsing. The items of a JSON array become
JSON lines, one at a time.
"""

import codecs
import glob
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from tost_lm.data.shard_format import FORMAT, MANIFEST
from tost_lm.data.sources.blocks import ROW_LIMIT, SourceBlock, blocks_of_rows, listed, too_long
from tost_lm.errors import DataError
from tost_lm.files import regular_file

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Endings of compressed text and JSON, and pyarrow's name of the codec."""
FORMATS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
COMPRESSIBLE = ("text", "jsonl", "json")
SUPPORTED = ".txt, .md, .jsonl, .json (also with .gz or .zst), .parquet or .arrow"
SHARDS_OF_ANY_VERSION = f'"format": "{FORMAT.rpartition(".")[0]}.'.encode()
MANIFEST_HEAD_BYTES = 200


class CorpusFile(NamedTuple):
    """A file of a corpus. `name` is relative to the source, so a corpus that moves keeps its fingerprint."""

    name: str
    path: Path
    size: int
    mtime_ns: int


def format_of(path: Path) -> str | None:
    """The format of a file by its ending, a value of FORMATS; None: a corpus cannot read it."""
    if path.suffix.lower() not in COMPRESSIONS:
        return FORMATS.get(path.suffix.lower())
    inner = FORMATS.get(Path(path.stem).suffix.lower())
    return inner if inner in COMPRESSIBLE else None


def corpus_files(source: str) -> list[CorpusFile]:
    """Every file of a corpus, sorted by name: one file, the supported files of a folder, or the matches of a glob.

    Hidden files, shard folders and trained tokenizers are ignored, so a corpus folder may contain the results of data
    preparation. Links are followed.

    Raises:
        DataError: no file, a named file of another format, or a folder that links to a folder that contains it.
    """
    path = Path(source)
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
                "set it to a file, a folder, a glob, hub:NAME or embedded"
            )
        for _, file in found:
            if format_of(file) is None:
                raise DataError(f"corpus.source {source}: {file} has no supported format; convert it to {SUPPORTED}")
        return [
            CorpusFile(name, file, (stat := regular_file(file).stat()).st_size, stat.st_mtime_ns)
            for name, file in found
        ]
    except OSError as error:
        raise DataError(f"corpus.source {source}: {error.filename}: {error.strerror}") from None


def left_out_files(source: str) -> str:
    """The files of a folder that a corpus cannot read, by ending: `left out 3 files: 2 .pdf, 1 without ending`.

    Empty if there are none. Files that `corpus_files` ignores by design do not count.
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
    """Name and path of the files below a folder, unsorted, without those that a corpus ignores by design."""
    for folder, folders, names in os.walk(root, onerror=_fail, followlinks=True):
        here = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for linked in (here / name for name in folders if (here / name).is_symlink()):
            target = linked.resolve()
            if any(above.resolve().is_relative_to(target) for above in (here, *here.parents)):
                raise DataError(f"{linked}: links to a folder that contains it; remove the link")
        if _is_shard_folder(here):
            continue
        for path in (here / name for name in names if not name.startswith(".")):
            if not _is_datasets_metadata(path, names) and not _is_tokenizer(path):
                yield path.relative_to(root).as_posix(), path


def _is_datasets_metadata(path: Path, siblings: list[str]) -> bool:
    """Whether the datasets library wrote this file beside its saved rows, and it holds no rows itself."""
    if path.name == "dataset_dict.json":
        return True
    saved = "state.json" in siblings and any(name.endswith(".arrow") for name in siblings)
    return saved and (path.name in ("state.json", "dataset_info.json") or path.match("cache-*.arrow"))


def _is_shard_folder(folder: Path) -> bool:
    """Whether build_shards wrote this folder."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    with regular_file(manifest).open("rb") as file:
        return SHARDS_OF_ANY_VERSION in file.read(MANIFEST_HEAD_BYTES)


def _is_tokenizer(path: Path) -> bool:
    """Whether a file is a model that train_tokenizer wrote, X.model, or the record beside it, X.model.json."""
    model = path.with_suffix("") if path.suffix == ".json" else path
    return model.suffix == ".model" and model.is_file() and model.with_name(f"{model.name}.json").is_file()


def _matching(source: str) -> Iterator[tuple[str, Path]]:
    """Files that a glob matches, unsorted; names are relative to the path before its first wildcard."""
    matched = [Path(match) for match in glob.glob(source, recursive=True)]
    of_shards = cache(_is_shard_folder)
    files = [path for path in matched if not path.is_dir() and not of_shards(path.parent) and not _is_tokenizer(path)]
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


class ByteStream:
    """The bytes of a file, decompressed according to its ending, without a byte order mark."""

    def __init__(self, path: Path):
        self._codec = COMPRESSIONS.get(path.suffix.lower())
        self._disk: Any
        if self._codec:
            if not path.stat().st_size:  # no codec writes an empty file, but pyarrow accepts one
                raise OSError("truncated to 0 bytes")
            import pyarrow

            self._disk = pyarrow.OSFile(str(path))
            self._bytes = io.BufferedReader(pyarrow.CompressedInputStream(self._disk, self._codec))
        else:
            self._disk = regular_file(path).open("rb", buffering=0)
            self._bytes = io.BufferedReader(self._disk)
        if self._bytes.peek(3)[:3] == codecs.BOM_UTF8:
            self._bytes.read(3)

    def __enter__(self) -> "ByteStream":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bytes.close()
        self._disk.close()

    def read(self, count: int = -1) -> bytes:
        """The next `count` bytes, fewer only at the end."""
        return self._bytes.read(count)

    def skip(self, count: int) -> None:
        """Skip `count` bytes."""
        if not self._codec:
            self._bytes.seek(count, io.SEEK_CUR)
            return
        while count and (skipped := len(self.read(min(count, 1 << 20)))):
            count -= skipped

    def consumed(self) -> int:
        """Number of bytes read from the file on disk."""
        return self._disk.tell() if self._codec else self._bytes.tell()


def line_blocks(path: Path, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """Blocks of whole lines, at most `block_bytes` long unless one line is longer."""
    with ByteStream(path) as stream:
        stream.skip(offset)
        rest = b""  # after the last newline: shorter than a block
        while True:
            reads = [rest, stream.read(block_bytes - len(rest))]
            while reads[-1] and b"\n" not in reads[-1]:
                if len(reads) * block_bytes > ROW_LIMIT:
                    raise too_long(f"{path}: a line", ROW_LIMIT)
                reads.append(stream.read(block_bytes))
            cut = reads[-1].rfind(b"\n") + 1
            rest = reads[-1][cut:]
            reads[-1] = reads[-1][:cut]
            payload = b"".join(reads)
            if not payload:
                return
            offset += len(payload)
            yield SourceBlock(payload, count_lines(payload), payload.count(b"\n"), offset, stream.consumed())


def count_lines(payload: bytes) -> int:
    """Number of lines that are not blank."""
    return sum(map(bool, map(bytes.strip, payload.split(b"\n"))))


def text_block(path: Path, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """A plain text file as one block of any size."""
    del offset, block_bytes
    with ByteStream(path) as stream:
        payload = stream.read(ROW_LIMIT + 1)
        if len(payload) > ROW_LIMIT:
            raise DataError(
                f"{path}: a document of more than {ROW_LIMIT >> 30} GiB; divide it, or set corpus.text_documents=line"
            )
        yield SourceBlock(payload, 1, 1, len(payload), stream.consumed())


FIRST_BYTES = 1 << 16
READ_BYTES = 1 << 20
FIRST = re.compile(r"\[[ \t\r\n]*(\])?")
NEXT = re.compile(r"[ \t\r\n]*(?:,|(\]))[ \t\r\n]*")
SCAN = json.JSONDecoder(parse_int=str, parse_float=str, strict=False).raw_decode
"""Finds the end of an item, even of one with control characters that JSON forbids.

Of ijson's parsers one writes "?" for lone surrogates and one holds the whole file.
"""
LONGEST_TOKEN = 16
"""At least the characters of a JSON token (other than a string) that the end of the text read so far may cut."""


def is_array(path: Path) -> bool:
    """Whether a JSON file begins as an array; otherwise it holds JSON lines."""
    with ByteStream(path) as stream:
        return _first_bytes(stream).startswith(b"[")


def array_blocks(path: Path, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """Blocks of JSON lines, one item a line, from item `offset`."""
    with ByteStream(path) as stream:
        yield from blocks_of_rows(_items(path, stream), offset, block_bytes, lambda _: stream.consumed())


def _first_bytes(stream: ByteStream) -> bytes:
    """Some bytes that begin with the first non-blank one."""
    while head := stream.read(FIRST_BYTES):
        if head := head.lstrip():
            return head
    return b""


def _items(path: Path, stream: ByteStream) -> Iterator[bytes]:
    """The items as the file has them, each on one line.

    A newline becomes a carriage return: equivalent between tokens, and equally forbidden in strings.
    """
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    text, at, pattern, number, ended = decode(_first_bytes(stream)), 0, FIRST, 0, False
    while match := pattern.match(text, at):
        if match[1]:
            if text[match.end() :].strip() or _first_bytes(stream):
                raise DataError(f"{path}: text follows the end of the array; remove it")
            return
        begin = match.end()
        end = _item_end(text, begin, ended, f"{path}, item {number}")
        if end:
            yield text[begin:end].replace("\n", "\r").encode(errors="surrogateescape")
            at, pattern, number = end, NEXT, number + 1
            continue
        if len(text) - at > ROW_LIMIT:
            raise too_long(f"{path}, item {number}", ROW_LIMIT)
        more = stream.read(max(READ_BYTES, len(text) - at))  # doubles, so that a long item is scanned only a few times
        text, at, ended = text[at:] + decode(more, not more), 0, not more


def _item_end(text: str, begin: int, ended: bool, where: str) -> int | None:
    """Where an item ends; None if the item or the sign after it is not read yet."""
    try:
        _, end = SCAN(text, begin)
        if NEXT.match(text, end):
            return end
        problem, place = "Expecting ',' delimiter", end + len(text[end:]) - len(text[end:].lstrip())
    except json.JSONDecodeError as error:
        problem, place = error.msg, error.pos
    except RecursionError:
        raise DataError(f"{where}: nested too deeply; correct or remove the item") from None
    incomplete = problem.startswith("Unterminated") or place > len(text) - LONGEST_TOKEN
    if ended or not incomplete:
        raise DataError(f"{where}: not JSON: {problem}; correct the file")
    return None
