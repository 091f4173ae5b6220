"""The interface of all tokenizers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tost_lm.files import sha256_bytes

if TYPE_CHECKING:
    import numpy as np


class Tokenizer(ABC):
    """Lossless conversion of text to token ids and back. Picklable.

    Attributes: `file_name` of the tokenizer in a shard folder or a checkpoint; `model_bytes`, the content of that file,
    with its `sha256` (hex); `vocab_size`; `eot`, the id that ends a document; and `has_eot`. Without it the vocabulary
    has no such id, and `eot` is an ordinary id that texts start after. `adds_space`: a space is put before every text.
    """

    file_name: str
    vocab_size: int
    eot: int
    has_eot = True
    adds_space = False

    def __init__(self, model_bytes: bytes) -> None:
        self.model_bytes = model_bytes
        self.sha256 = sha256_bytes(model_bytes)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text without lone surrogates. They never include the end-of-text id."""

    @abstractmethod
    def encode_array(self, text: str) -> "np.ndarray":
        """The ids of `encode` as uint32 [tokens], possibly read-only."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids in [0, vocab_size). The end-of-text id gives ''; invalid UTF-8 becomes U+FFFD."""
