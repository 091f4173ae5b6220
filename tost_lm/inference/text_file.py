"""A text file of any size, read in blocks; without torch."""

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.interface import encode_blocks
from tost_lm.errors import DataError
from tost_lm.files import regular_file

BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class TextFile:
    """A UTF-8 file that is not empty."""

    path: Path
    bytes: int
    sha256: str

    @classmethod
    def check(cls, path: Path, setting: str) -> "TextFile":
        """Read a file once from end to end; errors name `setting`.

        Raises:
            DataError: the path is not a file, or the file is empty or not UTF-8 (says where).
        """
        if not path.is_file():
            problem = "not a file; give a file, since a pipe cannot be read twice" if path.exists() else "no such file"
            raise DataError(f"{setting} {path}: {problem}")
        digest = hashlib.sha256()
        for _ in _decoded(path, digest):
            pass
        size = path.stat().st_size
        if not size:
            raise DataError(f"{setting} {path}: empty; give a text")
        return cls(path, size, digest.hexdigest())

    def blocks(self) -> Iterator[str]:
        """The text. Raises DataError at its end if it is not the one that was checked."""
        digest = hashlib.sha256()
        yield from _decoded(self.path, digest)
        if digest.hexdigest() != self.sha256:
            raise DataError(f"{self.path}: changed while it was read; start again when nothing writes to it")

    def end(self, characters: int) -> str:
        """The last `characters` characters, or the whole text if it is shorter."""
        with regular_file(self.path).open("rb") as file:
            file.seek(max(0, self.bytes - 4 * characters))
            return file.read().decode(errors="ignore")[-characters:]


def ids_of(tokenizer: Tokenizer, blocks: Iterable[str]) -> Iterator[Any]:
    """The ids that a model reads for a text in blocks: the end of text, then the text's ids in arrays."""
    return chain([tokenizer.eot], encode_blocks(tokenizer, blocks))


def _decoded(path: Path, digest: Any) -> Iterator[str]:
    """The text of a file in blocks; `digest` is updated with their bytes."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with regular_file(path).open("rb") as file:
        while True:
            data = file.read(BLOCK_BYTES)
            digest.update(data)
            done += len(data)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                byte, offset = error.object[error.start], done - len(error.object) + error.start
                raise DataError(
                    f"{path}: not UTF-8 (byte 0x{byte:02x} at offset {offset:,}); convert it to UTF-8"
                ) from None
            if not data:
                return
            yield text
