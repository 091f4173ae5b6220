"""Files that are either whole or absent: hashing, writing aside and renaming."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import xxhash


def sha256_bytes(data: bytes) -> str:
    """Hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def xxh3_file(path: Path) -> str:
    """Hex XXH3-128 of a file's bytes, which threads may take at once."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """The bytes of a manifest.json: JSON, the XXH3-128 of everything before it last."""
    body = json.dumps(manifest, indent=1, ensure_ascii=False).removesuffix("\n}")
    return f'{body},\n "xxh3": "{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}\n'.encode()


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader sees the old bytes or the new ones, never a part."""
    with writing_whole(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def writing_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to piece by piece; it takes the place of `path` at the end, and if that is not reached, nothing
    does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        flush(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a JSONL file whole, a row a line."""
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, up to the line that a killed writer left unfinished; none if there is no file."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # also the nothing behind the last newline
    return rows


def folder_aside(path: Path) -> Path:
    """A fresh, empty sibling of folder `path` to build it in; what an interrupted build left there is removed."""
    aside = discard_aside(path)
    aside.mkdir(parents=True)
    return aside


def discard_aside(path: Path) -> Path:
    """Remove what there is of a folder `path` that is being built, and say where it was."""
    aside = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    return aside


def publish_folder(aside: Path, path: Path) -> None:
    """Flush every file of `aside` to disk and make it the folder `path`, in place of an older one."""
    for entry in [*aside.rglob("*"), aside]:
        flush(entry)
    old = replaced_folder(path)
    restore_folder(path)
    if path.exists():
        path.rename(old)
    aside.rename(path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def replaced_folder(path: Path) -> Path:
    """Where the older folder lies while `publish_folder` puts another in its place."""
    return path.with_name(f".{path.name}.old")


def restore_folder(path: Path) -> None:
    """What a killed `publish_folder` left: the older folder comes back if there is no newer one, else it goes."""
    old = replaced_folder(path)
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
