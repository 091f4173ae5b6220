"""Reading regular files only, hashing, and atomic writes of files and folders (write to a temporary path, flush,
rename)."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TextIO

import xxhash

from tost_lm.errors import ConfigError


def regular_file(path: Path) -> Path:
    """`path`, to be opened. Whatever a user names, or a folder of a user contains, is opened by this path only.

    Raises:
        OSError: a pipe, a socket or a device, which may block for ever when it is opened or read.
    """
    if not path.is_file() and not path.is_dir() and path.exists():
        raise OSError(errno.EINVAL, "must be a regular file, not a pipe or a device", str(path))
    return path


def sha256_bytes(data: bytes) -> str:
    """Hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with regular_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def xxh3_file(path: Path) -> str:
    """Hex XXH3-128 of a file's bytes; threads may hash several files in parallel."""
    digest = xxhash.xxh3_128()
    with regular_file(path).open("rb", buffering=0) as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """The bytes of a manifest.json or results.json: JSON whose last key is the XXH3-128 of everything before it.

    Raises:
        ValueError: a number is not finite; JSON has no such numbers.
    """
    body = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
    return f'{body},\n "xxh3": "{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}\n'.encode()


def manifest_content(data: bytes) -> bytes | None:
    """The JSON of such a file without its hash, from the bytes of `manifest_bytes`; None: the hash is another."""
    body, _, end = data.rpartition(b',\n "xxh3": "')
    return body + b"\n}" if end == f'{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode() else None


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader sees either the old bytes or all new ones."""
    with atomic_writer(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that replaces `path` on a normal exit and is removed on an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temp.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
        flush(path.parent)
    except OSError as error:
        if error.filename == str(temp):  # the user knows `path`
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            temp.unlink(missing_ok=True)


def usual_mode(path: Path) -> None:
    """Let others read a new file as they read its folder: safetensors lets only its owner."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def require_writable(path: Path) -> None:
    """Raises ConfigError when its folder, or the nearest parent that exists, takes no file."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}; make {folder} writable, or use a copy of it"
        ) from None


def open_lock(path: Path) -> TextIO:
    """Open a lock file for reading and appending, made if there is none.

    Raises:
        ConfigError: it is a symbolic link, whose target the lock would overwrite.
        OSError: it cannot be opened, or as `regular_file`.
    """
    try:
        return open(regular_file(path), "a+", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(f"the lock file {path} is a symbolic link; remove it") from None


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a JSONL file atomically, one row a line. Raises ValueError as `manifest_bytes`."""
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file up to a line that a killed writer left incomplete; empty if there is no file."""
    rows = []
    for line in regular_file(path).read_bytes().split(b"\n") if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # also after the last newline
    return rows


def make_temp_folder(path: Path) -> Path:
    """An empty folder next to `path`, to be renamed by `publish_folder`; replaces one of an interrupted writer."""
    temp = remove_temp_folder(path)
    temp.mkdir(parents=True)
    return temp


def remove_temp_folder(path: Path) -> Path:
    """Remove the temporary folder of `path` and return where it was."""
    temp = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temp, ignore_errors=True)
    return temp


def publish_folder(temp: Path, path: Path) -> None:
    """Flush every file of `temp` to disk and rename it to `path`, replacing an older folder."""
    for entry in [*temp.rglob("*"), temp]:
        if not entry.is_symlink():
            flush(entry)
    old = backup_folder(path)
    restore_backup(path)
    if path.exists():
        path.rename(old)
    temp.rename(path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def backup_folder(path: Path) -> Path:
    """The older folder while `publish_folder` replaces it."""
    return path.with_name(f".{path.name}.old")


def restore_backup(path: Path) -> None:
    """Complete a killed `publish_folder`: restore the older folder if there is no newer one, else remove it."""
    old = backup_folder(path)
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush a file or a folder's entries to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
