"""The interface of all tokenizers, their bounded-memory use on texts of any length, and lossless SentencePiece."""

import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import numpy as np

from tost_lm.errors import DataError
from tost_lm.files import sha256_bytes


class Tokenizer(ABC):
    """Lossless conversion of text to token ids and back. Picklable.

    Attributes: `file_name` of the tokenizer in a shard folder or a checkpoint; `model_bytes`, the content of that file,
    with its `sha256` (hex); `vocab_size`; `eot`, the id that ends a document; `stop`, the id that ends a generated text
    (None: there is none); and `adds_space`: a space is put before every text.
    """

    file_name: str
    vocab_size: int
    eot: int
    stop: int | None
    adds_space = False

    def __init__(self, model_bytes: bytes) -> None:
        self.model_bytes = model_bytes
        self.sha256 = sha256_bytes(model_bytes)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text without lone surrogates. They never include the end-of-text id."""

    def encode_array(self, text: str) -> "np.ndarray":
        """The ids of `encode` as uint32 [tokens], possibly read-only."""
        return np.frombuffer(array("I", self.encode(text)), np.uint32)  # np.array takes three times as long

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids in [0, vocab_size). The end-of-text id gives ''; invalid UTF-8 becomes U+FFFD."""


# SentencePiece writes a space as U+2581 and decodes U+2581 as a space, so U+2581 in a text is escaped.
SPACE_MARK = "\u2581"
ESCAPE = "\U000f2581"
ESCAPED = {ESCAPE: ESCAPE + "0", SPACE_MARK: ESCAPE + "1"}
BREAK = ESCAPE + "2"  # decodes to nothing
UNESCAPED = {escaped: character for character, escaped in ESCAPED.items()} | {BREAK: ""}
TO_ESCAPE = re.compile("|".join(ESCAPED))
TO_UNESCAPE = re.compile("|".join(UNESCAPED))

# SentencePiece is slow on long texts, so they are cut before spaces.
SHORT_TEXTS = re.compile(r".{500,}?[^ ](?= )|.+", re.DOTALL)
TEXTS_AT_ONCE = 256  # bounds memory: SentencePiece returns Python lists, 50 bytes an id
PROBE = " a  b\t\n\0\ufb01é漢😀" + SPACE_MARK + " "
TRAIN = "train one with tost prepare tokenizer"
PIECE_BEYOND_WORD = re.compile(f"[^{SPACE_MARK}]{SPACE_MARK}")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with byte fallback; special pieces in a text are plain text."""

    file_name = "tokenizer.model"

    def __init__(self, model_bytes: bytes) -> None:
        """Raises DataError if the bytes are not a lossless SentencePiece model with an end-of-text piece."""
        import sentencepiece

        super().__init__(model_bytes)
        try:
            # SentencePiece accepts empty bytes as a model and then logs on every call.
            if not model_bytes:
                raise RuntimeError
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
        except RuntimeError:
            raise DataError(f"not a SentencePiece model; {TRAIN}") from None
        self.vocab_size = self._model.vocab_size()
        self.eot = self.stop = self._model.eos_id()
        if self.eot < 0:
            raise DataError(f"the SentencePiece model has no end-of-text piece (eos_id is -1); {TRAIN}")
        if self.decode(self._model.encode(escape(PROBE))) != PROBE:
            raise DataError(f"the SentencePiece model is not lossless (spaces, rare or normalized characters); {TRAIN}")
        pieces = map(self._model.id_to_piece, range(self.vocab_size))
        first, second, spaced, both = self._model.encode(["a", "b", " b", "a b"], num_threads=1)
        self.adds_space = first + second == both
        # True for the models trained here, not for some with user-defined symbols.
        self._cuts_at_spaces = first + spaced == both and not any(map(PIECE_BEYOND_WORD.search, pieces))

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> "np.ndarray":
        text = escape(text)
        short = (found[0] for found in SHORT_TEXTS.finditer(text)) if self._cuts_at_spaces else iter([text])
        arrays = [np.empty(0, np.uint32)]
        while texts := list(islice(short, TEXTS_AT_ONCE)):
            ids = self._model.encode(texts, num_threads=1)
            arrays.append(np.fromiter(chain.from_iterable(ids), np.uint32))
        return np.concatenate(arrays)

    def decode(self, ids: Iterable[int]) -> str:
        return unescape(self._model.decode([int(i) for i in ids]))


def escape(text: str) -> str:
    """Escape the characters that SentencePiece does not decode to themselves."""
    if SPACE_MARK not in text and ESCAPE not in text:
        return text
    return TO_ESCAPE.sub(lambda found: ESCAPED[found[0]], text)


def unescape(text: str) -> str:
    """Put the escaped characters back."""
    return TO_UNESCAPE.sub(lambda found: UNESCAPED[found[0]], text) if ESCAPE in text else text


BLOCK_CHARACTERS = 1 << 18
REPLACEMENT = "\ufffd"
MAX_INCOMPLETE = 3  # replacement characters of an incomplete UTF-8 sequence, at most
MAX_PENDING_IDS = 64  # this many ids without a complete character are not UTF-8


def encode_blocks(tokenizer: Tokenizer, blocks: Iterable[str]) -> Iterator["np.ndarray"]:
    """Token ids of the concatenated `blocks`, as arrays of any length, without the end-of-text id.

    The ids equal `tokenizer.encode` of the whole text if the text has spaces and the tokenizer cuts at them. The text
    is cut before a space that follows a non-space character. GPT-2 always cuts there; so does any other tokenizer
    unless one of its tokens crosses a word boundary (a user-defined symbol may). A block without such a space is cut
    at its end, where one token may become two, and a tokenizer that puts a space before a text puts one.
    """
    pending, space = "", ""
    for block in blocks:
        text = pending + block
        cut = _last_boundary(text)
        if not cut and len(text) >= BLOCK_CHARACTERS:
            cut = len(text)
        if cut:
            yield tokenizer.encode_array(text[:cut].removeprefix(space))
            space = " " if tokenizer.adds_space else ""  # it puts back the space before a cut
        pending = text[cut:]
    if pending:
        yield tokenizer.encode_array(pending.removeprefix(space))


def decode_ids(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of token ids, in complete characters; the concatenation equals `tokenizer.decode` of all ids.

    Yields one string (possibly empty) for each id and one at the end. After 64 ids without a complete last character,
    it yields the decoded text with its replacement characters.
    """
    context: list[int] = []  # ids before `pending`, because a tokenizer may trim the beginning of a text
    pending: list[int] = []
    emitted = 0
    for i in ids:
        pending.append(i)
        text = _decode_after(tokenizer, context, pending)
        complete = len(text) if len(pending) >= MAX_PENDING_IDS else _complete_characters(text)
        yield text[emitted:complete]
        emitted = complete
        if complete == len(text):
            context, pending, emitted = pending, [], 0
    yield _decode_after(tokenizer, context, pending)[emitted:]


def _last_boundary(text: str) -> int:
    """Index of the last space after a non-space character and before any character; 0: none."""
    end = len(text) - 1
    while (space := text.rfind(" ", 1, end)) > 0:
        if not text[space - 1].isspace():
            return space
        end = space
    return 0


def _decode_after(tokenizer: Tokenizer, context: list[int], ids: list[int]) -> str:
    """The text that `ids` add to the text of `context`."""
    return tokenizer.decode([*context, *ids])[len(tokenizer.decode(context)) :]


def _complete_characters(text: str) -> int:
    """Number of leading characters that later ids cannot change."""
    if text.endswith(ESCAPE):
        return len(text) - 1
    return len(text) - min(MAX_INCOMPLETE, len(text) - len(text.rstrip(REPLACEMENT)))
