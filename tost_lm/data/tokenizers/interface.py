"""What every kind of tokenizer does."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tost_lm.files import sha256_bytes

if TYPE_CHECKING:
    import numpy as np


class Tokenizer(ABC):
    """Text to token ids and back without loss; one file holds all of it.

    Attributes: `file_name`, what that file is called in a folder of shards or a checkpoint; `model_bytes`, its content,
    and their `sha256` (hex); `vocab_size`; and `eot`, the id that ends a document. Picklable.
    """

    file_name: str
    vocab_size: int
    eot: int

    def __init__(self, model_bytes: bytes) -> None:
        self.model_bytes = model_bytes
        self.sha256 = sha256_bytes(model_bytes)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text without lone surrogates; the end-of-text id is never among them."""

    @abstractmethod
    def encode_array(self, text: str) -> "np.ndarray":
        """What `encode` gives, uint32 [tokens], perhaps read-only."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids in [0, vocab_size): the end of text is '', bytes that are not UTF-8 become U+FFFD."""
