"""The lossless SentencePiece tokenizer: decoding returns every text exactly."""

import re
from collections.abc import Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING

from tost_lm.data.tokenizers.interface import Tokenizer
from tost_lm.errors import DataError

if TYPE_CHECKING:
    import numpy as np

# SentencePiece writes a space as U+2581 and decodes U+2581 as a space, so U+2581 in a text is escaped.
SPACE_MARK = "\u2581"
ESCAPE = "\U000f2581"
ESCAPED = {ESCAPE: ESCAPE + "0", SPACE_MARK: ESCAPE + "1"}
UNESCAPED = {escaped: character for character, escaped in ESCAPED.items()}
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
        self.eot = self._model.eos_id()
        if self.eot < 0:
            raise DataError(f"the SentencePiece model has no end-of-text piece (eos_id is -1); {TRAIN}")
        if self.decode(self._model.encode(escape(PROBE))) != PROBE:
            raise DataError(f"the SentencePiece model is not lossless (spaces, rare or normalized characters); {TRAIN}")
        pieces = map(self._model.id_to_piece, range(self.vocab_size))
        first, second, spaced, both = self._model.encode(["a", "b", " b", "a b"], num_threads=1)
        self.adds_space = first + second == both
        # True for the models trained here, except with some user symbols.
        self._cuts_at_spaces = first + spaced == both and not any(map(PIECE_BEYOND_WORD.search, pieces))

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> "np.ndarray":
        import numpy as np

        text = escape(text)
        short = (found[0] for found in SHORT_TEXTS.finditer(text)) if self._cuts_at_spaces else iter([text])
        arrays = [np.empty(0, np.uint32)]
        while texts := list(islice(short, TEXTS_AT_ONCE)):
            ids = self._model.encode(texts, num_threads=1)
            arrays.append(np.fromiter(chain.from_iterable(ids), np.uint32))
        return np.concatenate(arrays)

    def decode(self, ids: Iterable[int]) -> str:
        text = self._model.decode([int(i) for i in ids])
        if ESCAPE not in text:
            return text
        return TO_UNESCAPE.sub(lambda found: UNESCAPED[found[0]], text)


def escape(text: str) -> str:
    """Escape the characters that SentencePiece does not decode to themselves."""
    if SPACE_MARK not in text and ESCAPE not in text:
        return text
    return TO_ESCAPE.sub(lambda found: ESCAPED[found[0]], text)
