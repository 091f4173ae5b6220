"""Files of JSON lines and plain text, cut into pieces at line ends without a look at what the lines say."""

import codecs
import io
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tost_lm.data.sources.blocks import ROW_LIMIT, Piece
from tost_lm.data.sources.files import COMPRESSIONS
from tost_lm.data.sources.messages import too_long
from tost_lm.errors import DataError


class ByteStream:
    """A file's bytes, decompressed by its ending and without a byte order mark."""

    def __init__(self, path: Path):
        self._codec = COMPRESSIONS.get(path.suffix.lower())
        self._disk: Any
        if self._codec:
            if not path.stat().st_size:  # no codec writes that; pyarrow takes it for an empty text
                raise OSError("truncated to 0 bytes")
            import pyarrow

            self._disk = pyarrow.OSFile(str(path))
            self._bytes = io.BufferedReader(pyarrow.CompressedInputStream(self._disk, self._codec))
        else:
            self._disk = path.open("rb", buffering=0)
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
        """Leave out `count` bytes."""
        if not self._codec:
            self._bytes.seek(count, io.SEEK_CUR)
            return
        while count and (skipped := len(self.read(min(count, 1 << 20)))):
            count -= skipped

    def consumed(self) -> int:
        """How many bytes of the file on disk have been read."""
        return self._disk.tell() if self._codec else self._bytes.tell()


def line_pieces(path: Path, offset: int, block_bytes: int) -> Iterator[Piece]:
    """Pieces of whole lines, of `block_bytes` at most unless one line is longer."""
    with ByteStream(path) as stream:
        stream.skip(offset)
        rest = b""  # behind the last newline: shorter than a piece and without a newline
        while True:
            parts = [rest, stream.read(block_bytes - len(rest))]
            while parts[-1] and b"\n" not in parts[-1]:
                if len(parts) * block_bytes > ROW_LIMIT:
                    raise too_long(f"{path}: a line", ROW_LIMIT)
                parts.append(stream.read(block_bytes))
            cut = parts[-1].rfind(b"\n") + 1
            rest = parts[-1][cut:]
            parts[-1] = parts[-1][:cut]
            payload = b"".join(parts)
            if not payload:
                return
            offset += len(payload)
            yield Piece(payload, count_lines(payload), payload.count(b"\n"), offset, stream.consumed())


def count_lines(payload: bytes) -> int:
    """How many lines are not blank."""
    return sum(map(bool, map(bytes.strip, payload.split(b"\n"))))


def whole_text(path: Path, offset: int, block_bytes: int) -> Iterator[Piece]:
    """A plain text file as one piece, of whatever size."""
    del offset, block_bytes
    with ByteStream(path) as stream:
        payload = stream.read(ROW_LIMIT + 1)
        if len(payload) > ROW_LIMIT:
            raise DataError(
                f"{path}: a document of more than {ROW_LIMIT >> 30} GiB; corpus.text_documents=line makes each line one"
            )
        yield Piece(payload, 1, 1, len(payload), stream.consumed())
