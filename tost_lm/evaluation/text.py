"""A text file of any size, read in blocks, and its score as one stream (protocol text@bpb)."""

import codecs
import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.piecewise import encode_blocks
from tost_lm.errors import DataError
from tost_lm.evaluation.scoring import rates
from tost_lm.model.streaming import Reader, TokenStream

if TYPE_CHECKING:
    from tost_lm.model import LMState

BLOCK_BYTES = 1 << 18
TELL_EVERY_S = 60.0


@dataclass(frozen=True)
class TextFile:
    """A UTF-8 file that is not empty, with its size and hash."""

    path: Path
    bytes: int
    sha256: str

    @classmethod
    def check(cls, path: Path, setting: str) -> "TextFile":
        """Read a file once from end to end; `setting` is what names it to the user.

        Raises:
            DataError: it is no file, empty, or not UTF-8 (says where).
        """
        if not path.is_file():
            problem = "not a file; it is read twice, so a pipe will not do" if path.exists() else "no such file"
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
            raise DataError(f"{self.path}: changed while it was read; start again when it stays as it is")

    def end(self, characters: int) -> str:
        """The last so many characters, or all of it."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.bytes - 4 * characters))
            return file.read().decode(errors="ignore")[-characters:]


def ids_of(tokenizer: Tokenizer, blocks: Iterable[str]) -> Iterator[Any]:
    """What a model reads of a text that is given in blocks: the end of text, and then its ids in arrays."""
    return chain([tokenizer.eot], encode_blocks(tokenizer, blocks))


def score_text(model: Reader, tokenizer: Tokenizer, text: TextFile) -> "tuple[dict[str, Any], LMState]":
    """Nats a token, perplexity a token and bits a byte of a text, each token given all before it; and the state then.

    The file, its ids and what the model computes pass in pieces: memory does not grow with the text, unless the model
    has softmax layers without a window. The text stands behind an end of text, which is not scored, and none follows
    it. Its ids are those of the whole text (`encode_blocks` says where a tokenizer or a text without spaces forbids
    that). Prints the mean so far each minute.

    Args:
        model: in evaluation mode; on several ranks all of them call it.

    Raises:
        ConfigError: the text passes the model's positions.
        DataError: the file changed.
    """
    stream = TokenStream(model, ids_of(tokenizer, text.blocks()))
    nats, tokens, told = 0.0, 0, time.monotonic()
    for piece in stream:
        nats, tokens = nats + float(piece.sum()), tokens + len(piece)
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            print(f"{tokens:,} tokens, {nats / tokens:.4f} nats/token so far", flush=True)
    assert stream.state is not None
    return rates(nats, tokens, text.bytes), stream.state


def _decoded(path: Path, digest: Any) -> Iterator[str]:
    """The text of a file in blocks, whose bytes `digest` takes in."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            data = file.read(BLOCK_BYTES)
            digest.update(data)
            done += len(data)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                place = done - len(error.object) + error.start
                raise DataError(
                    f"{path}: not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {place:,}); convert it first"
                ) from None
            if not data:
                return
            yield text
