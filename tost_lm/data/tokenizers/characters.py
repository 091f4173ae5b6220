"""Character-level vocabularies, as in the released code's character-level runs."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tost_lm.data.tokenizers.interface import Tokenizer
from tost_lm.errors import DataError

if TYPE_CHECKING:
    import numpy as np


class CharacterTokenizer(Tokenizer):
    """One id per character. It has no end-of-text id: texts start after a newline, or after id 0 if there is none.

    `model_bytes` are a JSON string of the characters in the order of their ids.
    """

    file_name = "characters.json"
    has_eot = False

    def __init__(self, model_bytes: bytes) -> None:
        """Raises DataError if the bytes are not a JSON string of distinct characters."""
        super().__init__(model_bytes)
        try:
            characters = json.loads(model_bytes)
        except ValueError:
            characters = None
        if not isinstance(characters, str) or not 0 < len(characters) == len(set(characters)):
            raise DataError("not a JSON string of distinct characters; give another tokenizer")
        self._characters, self.vocab_size = characters, len(characters)
        self._ids = {character: i for i, character in enumerate(characters)}
        self.eot = self._ids.get("\n", 0)

    def encode(self, text: str) -> list[int]:
        """Raises DataError for a character outside the vocabulary."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise DataError(
                f"character outside the model's vocabulary: {error.args[0]!r}; remove it from the text"
            ) from None

    def encode_array(self, text: str) -> "np.ndarray":
        import numpy as np

        return np.array(self.encode(text), dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self._characters[i] for i in ids)
