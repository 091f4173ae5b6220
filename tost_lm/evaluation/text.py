"""A text file of any size, read in blocks, and its score as one stream (protocol text@bpb)."""

import codecs
import ctypes
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.interface import encode_blocks
from tost_lm.errors import ConfigError, DataError
from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.saved_position import Position, SavedPosition
from tost_lm.evaluation.scoring import rates
from tost_lm.model.streaming import TILE_TOKENS, TokenStream

if TYPE_CHECKING:
    from tost_lm.model import LMState

BLOCK_BYTES, ID_BYTES = 1 << 18, 4

Report = Callable[[int, int, str], object]
"""Called with the number of tokens scored so far, the number of all tokens, and a note."""


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
        with self.path.open("rb") as file:
            file.seek(max(0, self.bytes - 4 * characters))
            return file.read().decode(errors="ignore")[-characters:]


def ids_of(tokenizer: Tokenizer, blocks: Iterable[str]) -> Iterator[Any]:
    """The ids that a model reads for a text in blocks: the end of text, then the text's ids in arrays."""
    return chain([tokenizer.eot], encode_blocks(tokenizer, blocks))


def score_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    text: TextFile,
    ranks: Ranks | None = None,
    saved: SavedPosition | None = None,
    report: Report | None = None,
) -> "tuple[dict[str, Any], LMState]":
    """Nats per token, perplexity and bits per byte of a text, each token given all before it; and the final state.

    Memory does not grow with the text, unless the model has softmax layers without a window. The model reads an end of
    text first, which is not scored. The ids are those of the whole text, within the limits that `encode_blocks` states;
    they are in a temporary file. Each sequence rank processes TILE_TOKENS tokens at a time.

    Args:
        model: in evaluation mode.
        ranks: all of them call it; None: only this one.
        saved: where scoring resumes, and where its position is saved.
        report: called after each tile.

    Raises:
        ConfigError: the text is longer than the model's positions.
        DataError: the file changed while it was read.
    """
    ranks = ranks or Ranks()
    with tempfile.TemporaryFile() as ids_file:
        length = _write_ids(ids_file, ranks.each(ids_of(tokenizer, text.blocks())))
        limit = model.config.position_limit
        if limit is not None and length > limit:
            raise ConfigError(
                f"{text.path}: {length:,} tokens are more than the model's positions (model.max_positions = "
                f"{limit:,}); shorten the text, or extend the model with tost extend"
            )
        at = saved.read(model) if saved else Position()
        if report:
            report(at.tokens, length, "")
        stream = TokenStream(model, _ids_from(ids_file, at.tokens), at.state, TILE_TOKENS * ranks.sequence_ranks)
        for nats_T in ranks.each(stream):
            at = Position(at.tokens + len(nats_T), at.nats + float(nats_T.sum()), stream.state)
            if report:
                report(at.tokens, length, f"{at.nats / at.tokens:.4f} nats/token")
            if saved:
                saved.write_if_due(at)
            _return_freed_memory()
    assert at.state
    return rates(at.nats, at.tokens, text.bytes), at.state


def _return_freed_memory() -> None:
    """Give freed memory back to the system: glibc keeps more and more of it, between pieces that are in use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _write_ids(file: IO[bytes], blocks: Iterable[Any]) -> int:
    """Write blocks of ids as uint32; returns the number of ids after the first."""
    for ids in blocks:
        file.write(np.asarray(ids, np.uint32).tobytes())
    return file.tell() // ID_BYTES - 1


def _ids_from(file: IO[bytes], first: int) -> Iterator[np.ndarray]:
    """Blocks of the ids from index `first` on. They are read, because mapped pages would count as memory."""
    file.seek(first * ID_BYTES)
    while block := file.read(BLOCK_BYTES):
        yield np.frombuffer(block, np.uint32)


def _decoded(path: Path, digest: Any) -> Iterator[str]:
    """The text of a file in blocks; `digest` is updated with their bytes."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
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
