"""Files at URLs, by fsspec: listed, opened, fetched into a cache on the local disk, and uploaded.

A file system is opened in the function that uses it, because fsspec has one for each thread. The cache is the folder
TOST_CACHE (default ~/.cache/tost_lm) of up to TOST_CACHE_GB (default 100): half for blocks of token shards, which are
named by their hash, and half for copies of folders and files, which are named by what the URL has.
"""

import fcntl
import io
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path, PosixPath
from typing import Any, NamedTuple, TextIO

import xxhash

from tost_lm.errors import StorageError, TostError, first_line, install_hint
from tost_lm.files import open_lock, publish_folder, regular_file, sha256_bytes
from tost_lm.redaction import redact_text

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "file": "fsspec", "memory": "fsspec"}
"""The schemes of URLs, and the package that reads each."""
FETCHED_AT_ONCE = 64
"""Blocks that are fetched concurrently, and are in memory meanwhile."""
BUCKETS = 256
"""Folders of blocks, by the first byte of their hash. Each is kept below its fraction of the size limit."""
URL = re.compile(rf"(?:{'|'.join(PACKAGES)}):/.*", re.DOTALL)


class RemotePath(PosixPath):
    """A URL. It has the names and parents of a path, and nothing of it exists on the local disk."""

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{'/' * (scheme == 'file')}{rest}"


def as_path(path: str | Path) -> Path:
    """The path of a file or folder that may be at a URL, also where pathlib has made one slash of two."""
    return RemotePath(path) if URL.fullmatch(str(path)) else Path(path)


class RemoteFile(NamedTuple):
    """A file at a URL; one that was written again has another version."""

    url: RemotePath
    size: int
    version: str


def list_files(url: Path, *, deep: bool = False) -> dict[str, RemoteFile]:
    """The files in a folder (`deep`: also below it) by their path there, or the one file at the URL by its name; empty:
    there is none.

    Raises:
        StorageError: the storage cannot be reached, or refuses.
    """
    tags = ("ETag", "etag", "mtime", "LastModified", "updated", "created", "blob_id")
    with _explained(url):
        system, root = _open_system(url)
        found = sorted(_walk(system, root, deep), key=lambda info: info["name"])
    files = {}
    for info in found:
        name, version = info["name"], next((str(info[tag]) for tag in tags if info.get(tag)), "")
        path = RemotePath(f"{url.parts[0]}//{name}")
        files[name.removeprefix(root).strip("/") or path.name] = RemoteFile(path, info["size"], version)
    return files


def glob_files(url: RemotePath) -> dict[str, RemoteFile]:
    """The files that a glob matches, by their path below its part without wildcards. Raises as `list_files`."""
    files = list_files(as_path(re.split(r"/[^/]*[*?[]", str(url))[0]), deep=True)
    from fsspec.utils import glob_translate

    matches = re.compile(glob_translate(str(url))).match
    return {name: file for name, file in files.items() if matches(str(file.url))}


def _walk(system: Any, root: str, deep: bool) -> Iterator[dict[str, Any]]:
    """Facts about each file. fsspec's `find` and `glob` leave out folders that cannot be listed."""
    try:
        found = system.ls(root, detail=True, refresh=True)  # that of the hub keeps listings
    except (FileNotFoundError, NotADirectoryError):
        return
    for info in found:
        if info["type"] == "file":
            yield info
        elif deep and info["name"] != root:
            yield from _walk(system, info["name"], deep)


class RemoteReader(io.RawIOBase):
    """The bytes of a file at a URL, read on demand. Raises StorageError as `list_files`."""

    def __init__(self, url: RemotePath) -> None:
        self._url = url
        with _explained(url):
            system, path = _open_system(url)
            self._file = system.open(path, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _explained(self._url):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with _explained(self._url):
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def open_file(path: Path) -> io.RawIOBase:
    """A file, opened for reading; it must be a regular one, or at a URL."""
    return RemoteReader(path) if isinstance(path, RemotePath) else regular_file(path).open("rb", buffering=0)


def local_copy(
    path: Path, verify: Callable[[Path], object] = lambda copy: None, wanted: Callable[[str], bool] = lambda name: True
) -> Path:
    """A local path itself; of a URL, a copy of the file or folder in the cache, which stays while this process runs.

    Args:
        verify: raises TostError if a new copy is damaged.
        wanted: whether a file of the folder, by its name, is copied.

    Raises:
        StorageError: as `list_files`, or there is no such file.
    """
    if not isinstance(path, RemotePath):
        return path
    files = list_files(path)
    is_file = [*files] == [path.name]
    folder = path.parent if is_file else path
    identity = sha256_bytes(json.dumps([[str(file.url), *file[1:]] for file in files.values()]).encode())[:32]
    home = cache_folder() / "copies" / identity
    copy = home / (folder.name or "files")
    _hold(home)
    if not copy.exists():
        kept = {name: file for name, file in files.items() if wanted(name)}
        _make_room(sum(file.size for file in kept.values()))
        fetch_folder(folder, copy, verify, files=kept)
    os.utime(home)
    return copy / path.name if is_file else copy


def fetch_folder(
    url: Path,
    target: Path,
    verify: Callable[[Path], object] = lambda copy: None,
    *,
    files: dict[str, RemoteFile] | None = None,
    is_there: Callable[[Path], bool] = Path.exists,
) -> None:
    """Copy the files of a folder to `target`, completely or not at all. Of several processes one does it.

    Args:
        files: those to copy; None: all.
        is_there: whether `target` is complete already.

    Raises:
        StorageError: as `local_copy`.
        TostError: as `verify`, with the URL in place of the copy's path.
    """
    assert isinstance(url, RemotePath)
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    temp = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    with open_lock(lock) as file:
        with suppress(OSError):  # a file system without locks: several processes copy, each for itself
            fcntl.flock(file, fcntl.LOCK_EX)
        if is_there(target):
            return
        try:
            files = list_files(url) if files is None else files
            if not files:
                raise StorageError(f"{url}: no such file or folder; correct the URL")
            temp.mkdir()
            with _explained(url):
                system, root = _open_system(url)
                system.get([f"{root}/{name}" for name in files], [str(temp / name) for name in files])
            for name, (_, size, _) in files.items():
                if (found := (temp / name).stat().st_size) != size:
                    raise StorageError(f"{url / name}: {found:,} bytes arrived of {size:,}; run the same command again")
            try:
                verify(temp)
            except TostError as error:
                raise type(error)(str(error).replace(str(temp), str(url))) from None
            if not is_there(target):
                publish_folder(temp, target)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
            lock.unlink(missing_ok=True)


def upload_folder(folder: Path, url: Path, last: str) -> None:
    """Copy a folder of files to a URL; the file `last` is removed there first and written last, so that a folder is
    complete if it has this file.

    Raises:
        StorageError: as `list_files`.
    """
    with _explained(url):
        names = sorted(file.name for file in folder.iterdir())
        remove_file(url / last)
        system, root = _open_system(url)
        for name in sorted(names, key=lambda name: name == last):
            system.put_file(str(folder / name), f"{root}/{name}")


def read_file(url: Path) -> bytes | None:
    """The bytes of a file; None: there is none. Raises StorageError."""
    with _explained(url):
        system, path = _open_system(url)
        try:
            return system.cat_file(path)
        except FileNotFoundError:
            return None


def write_file(url: Path, data: bytes) -> None:
    """Write a file. Raises StorageError."""
    with _explained(url):
        system, path = _open_system(url)
        system.pipe_file(path, data)


def remove_file(url: Path) -> None:
    """Remove a file, if there is one. Raises StorageError."""
    with _explained(url), suppress(FileNotFoundError):
        system, path = _open_system(url)
        system.rm_file(path)


def remove_folder(url: Path, first: str) -> None:
    """Remove a folder, its file `first` before the others. Raises StorageError."""
    files = list_files(url, deep=True)
    for name in sorted(files, key=lambda name: name != first):
        remove_file(files[name].url)
    with _explained(url), suppress(OSError):  # only local disks and tests have empty folders
        system, root = _open_system(url)
        system.rmdir(root)


class RemoteBlock(NamedTuple):
    """Bytes of a file at a URL with their XXH3-128 in hex."""

    url: RemotePath
    start: int
    stop: int
    xxh3: str
    cached: str
    """Its file in the cache: pathlib would take longer than reading it."""


def blocks_folder() -> str:
    """The folder of cached blocks; a block is below it in XX/HASH, where XX begins its hash."""
    return str(cache_folder() / "blocks")


def read_block(block: RemoteBlock, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of a block, which is fetched if it is not in the cache. Raises as `fetch_blocks`."""
    data = b""
    with suppress(OSError):  # there is none, or what is there is no file
        file = os.open(block.cached, os.O_RDONLY | os.O_NONBLOCK)
        try:
            data = os.pread(file, stop - start, start)
        finally:
            os.close(file)
    return data if len(data) == stop - start else next(_fetched([block]))[start:stop]


def fetch_blocks(blocks: Sequence[RemoteBlock]) -> None:
    """Fetch blocks into the cache, many at once.

    Raises:
        StorageError: as `list_files`; a block differs from its hash; or the cache cannot be written.
    """
    for _ in _fetched(blocks):
        pass


def _fetched(blocks: Sequence[RemoteBlock]) -> Iterator[bytes]:
    for _, one_storage in groupby(blocks, lambda block: block.url.parts[0]):
        left = [*one_storage]
        while left:
            some, left = left[:FETCHED_AT_ONCE], left[FETCHED_AT_ONCE:]
            with _explained(some[0].url):
                system, _ = _open_system(some[0].url)
                paths = [_open_system(block.url)[1] for block in some]
                found = system.cat_ranges(paths, [block.start for block in some], [block.stop for block in some])
            for block, data in zip(some, found, strict=True):
                with _explained(block.url):
                    if isinstance(data, Exception):
                        raise data
                if xxhash.xxh3_128_hexdigest(data) != block.xxh3:
                    raise StorageError(
                        f"{block.url}: damaged between bytes {block.start:,} and {block.stop:,}, their hash differs "
                        "from the manifest; upload the file again"
                    )
                _keep_block(block, data)
                yield data


def _keep_block(block: RemoteBlock, data: bytes) -> None:
    """Write a block into the cache, and remove the oldest ones that exceed the limit of its folder."""
    limit = _limit_bytes() // 2 // BUCKETS
    file = Path(block.cached)
    temp = file.with_name(f".{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temp.write_bytes(data)  # not flushed to disk: it is hashed again when a process first reads it
        temp.replace(file)
        kept = []
        for path in file.parent.iterdir():
            with suppress(FileNotFoundError):  # another process has removed it
                facts = path.stat()
                kept.append((facts.st_mtime_ns, facts.st_size, path))
        excess = sum(size for _, size, _ in kept) - limit
        for _, size, path in sorted(kept):
            if excess > 0 and path != file:
                path.unlink(missing_ok=True)
                excess -= size
    except OSError as error:
        raise StorageError(
            f"{block.cached}: cannot be written: {error.strerror}; clear the cache, or set TOST_CACHE to a folder with "
            "free space"
        ) from None


def cache_folder() -> Path:
    """The folder of the cache. Raises StorageError if no variable and no home folder says where it is."""
    try:
        return Path(os.environ.get("TOST_CACHE") or Path.home() / ".cache" / "tost_lm")
    except RuntimeError:
        raise StorageError(
            "the cache has no folder: HOME is not set, and this user has no home; set TOST_CACHE to a folder on a "
            "local disk"
        ) from None


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder beside the cache for files that are uploaded, and removed then."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        yield Path(folder)


def _limit_bytes() -> int:
    text = os.environ.get("TOST_CACHE_GB", "100")
    try:
        return int(float(text) * 1e9)
    except (ValueError, OverflowError):
        raise StorageError(f"TOST_CACHE_GB {text}: not a number; set the size of the cache in GB") from None


_held: dict[Path, TextIO] = {}
"""The lock file of each copy that this process uses."""


def _hold(home: Path) -> None:
    """Keep a copy from being removed by other processes until this one ends."""
    lock = home / ".lock"
    while home not in _held or not lock.exists():
        home.mkdir(parents=True, exist_ok=True)
        _held[home] = lock.open("a")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(_held[home], fcntl.LOCK_SH)


def _make_room(needed: int) -> None:
    """Remove the copies that were not used for the longest time, so that a new one fits; those in use stay."""
    excess = needed - _limit_bytes() // 2
    with suppress(FileNotFoundError):  # another process makes room, too
        homes = sorted((cache_folder() / "copies").iterdir(), key=lambda home: home.stat().st_mtime)
        sizes = {home: sum(file.lstat().st_size for file in home.rglob("*")) for home in homes}
        excess += sum(sizes.values())
        for home in homes:
            with suppress(OSError), (home / ".lock").open("a") as file:
                if excess > 0 and home not in _held:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(home)
                    excess -= sizes[home]


def _open_system(url: Path) -> tuple[Any, str]:
    """The file system of a URL, of this process, and the path there.

    The path is literal: fsspec's `rm`, `copy`, `get` and `put` of one path would expand `*`, `?` and `[` in it, and
    `url_to_fs` would split it at `::`.
    """
    from fsspec import filesystem
    from fsspec.core import strip_protocol

    if "?versionId=" in str(url):
        raise StorageError(f"{url}: versions of objects are not supported; remove ?versionId= and what follows")
    options = {"auto_mkdir": True} if url.parts[0] == "file:" else {}
    system = filesystem(url.parts[0].rstrip(":"), use_listings_cache=False, **options)
    return system, strip_protocol(str(url))


@contextmanager
def _explained(url: Path) -> Iterator[None]:
    """Every error of a storage, its client and the network becomes one line without credentials."""
    try:
        yield
    except TostError:
        raise
    except ImportError:
        package = PACKAGES[url.parts[0].rstrip(":")]
        raise StorageError(f"{url}: the package {package} is not installed; {install_hint('remote')}") from None
    except Exception as error:
        missing = isinstance(error, FileNotFoundError)
        problem = "no such file or folder" if missing else redact_text(first_line(error))
        raise StorageError(
            f"{url}: {problem}; check the URL, the credentials and the network, then run the same command again"
        ) from None
