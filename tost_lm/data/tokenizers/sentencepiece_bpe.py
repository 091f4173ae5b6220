"""The lossless SentencePiece tokenizer: every text comes back exactly from its ids."""

import re
from collections.abc import Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING

from tost_lm.data.tokenizers.interface import Tokenizer
from tost_lm.errors import DataError

if TYPE_CHECKING:
    import numpy as np

# SentencePiece writes a space as U+2581 and reads that back as a space, so a real one goes in disguise.
SPACE_MARK = "\u2581"
ESCAPE = "\U000f2581"
ESCAPED = {ESCAPE: ESCAPE + "0", SPACE_MARK: ESCAPE + "1"}
UNESCAPED = {disguise: character for character, disguise in ESCAPED.items()}
TO_ESCAPE = re.compile("|".join(ESCAPED))
TO_UNESCAPE = re.compile("|".join(UNESCAPED))

# Texts cut before spaces, since SentencePiece is slow with long ones.
PARTS = re.compile(r".{500,}?[^ ](?= )|.+", re.DOTALL)
PORTION = 256  # parts whose ids are lists of Python's numbers, 50 bytes each, at one time
PROBE = " a  b\t\n\0\ufb01é漢😀" + SPACE_MARK + " "
PIECE_BEYOND_WORD = re.compile(f"[^{SPACE_MARK}]{SPACE_MARK}")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with byte pieces; special pieces in a text are plain text."""

    file_name = "tokenizer.model"

    def __init__(self, model_bytes: bytes) -> None:
        """Raises DataError if the bytes are no SentencePiece model with an end-of-text piece, or it loses text."""
        import sentencepiece

        super().__init__(model_bytes)
        try:
            # Without the check SentencePiece takes empty bytes for a model and logs on every call.
            if not model_bytes:
                raise RuntimeError
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
        except RuntimeError:
            raise DataError("not a SentencePiece model; train one with python -m data_prep.train_tokenizer") from None
        self.vocab_size = self._model.vocab_size()
        self.eot = self._model.eos_id()
        if self.eot < 0:
            raise DataError("the SentencePiece model has no end-of-text piece (eos_id is -1)")
        if self.decode(self._model.encode(escape(PROBE))) != PROBE:
            raise DataError(
                "this SentencePiece model loses text (spaces, rare characters or forms of them); "
                "train one with python -m data_prep.train_tokenizer"
            )
        pieces = map(self._model.id_to_piece, range(self.vocab_size))
        first, second, both = self._model.encode(["a", " b", "a b"], num_threads=1)
        # Ours are so, but for some user symbols.
        self._words_apart = first + second == both and not any(map(PIECE_BEYOND_WORD.search, pieces))

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> "np.ndarray":
        import numpy as np

        text = escape(text)
        parts = (part[0] for part in PARTS.finditer(text)) if self._words_apart else iter([text])
        arrays = [np.empty(0, np.uint32)]
        while portion := list(islice(parts, PORTION)):
            ids = self._model.encode(portion, num_threads=1)
            arrays.append(np.fromiter(chain.from_iterable(ids), np.uint32))
        return np.concatenate(arrays)

    def decode(self, ids: Iterable[int]) -> str:
        text = self._model.decode([int(i) for i in ids])
        if ESCAPE not in text:
            return text
        return TO_UNESCAPE.sub(lambda found: UNESCAPED[found[0]], text)


def escape(text: str) -> str:
    """A text as SentencePiece can give it back."""
    if SPACE_MARK not in text and ESCAPE not in text:
        return text
    return TO_ESCAPE.sub(lambda found: ESCAPED[found[0]], text)
