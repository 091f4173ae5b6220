"""The check that decoding restores a text. Where text is lost, bits per byte and comparisons of answers are wrong."""

import unicodedata
from collections.abc import Iterable
from functools import cache
from itertools import takewhile
from operator import eq

from tost_lm.data.tokenizers.interface import Tokenizer
from tost_lm.errors import DataError

SHOWN = 20  # characters of a text
FORMS = ("none", "NFC", "NFKC")  # a text in one of these is also in those before it
NO_CHARACTERS = ("Cn", "Cs", "Co", "Cc")  # categories: not assigned, surrogates, private use, controls


def first_loss(text: str, decoded: str) -> str | None:
    """The first place where a decoded text differs from the text, in words; None: nowhere."""
    if decoded == text:
        return None
    start = max(0, sum(1 for _ in takewhile(bool, map(eq, text, decoded))) - SHOWN // 2)
    return f"it decodes {text[start : start + SHOWN]!r} as {decoded[start : start + SHOWN]!r}"


def in_form(form: str, text: str) -> str:
    """A text in a Unicode form of FORMS."""
    return text if form == "none" else unicodedata.normalize(form, text)  # pyright: ignore[reportArgumentType]


@cache
def every_character() -> str:
    """A text with each character of Unicode but controls, of which public tokenizers lack some."""
    return "".join(c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in NO_CHARACTERS)


class LosslessTokenizer(Tokenizer):
    """A tokenizer for texts that are scored: encoding raises DataError if decoding does not restore the text.

    A space before the text may be lost: tokenizers of the Hugging Face library add or drop one.

    Args:
        name: of the tokenizer, for errors.
    """

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer, self._name = tokenizer, name
        self.vocab_size, self.eot, self.sha256 = tokenizer.vocab_size, tokenizer.eot, tokenizer.sha256
        self.stop, self.adds_space = tokenizer.stop, tokenizer.adds_space

    def encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text)
        text, decoded = text.removeprefix(" "), self.decode(ids).removeprefix(" ")
        if (loss := first_loss(text, decoded)) is None:
            return ids
        forms = [form for form in FORMS[1:] if in_form(form, text) == decoded]
        fix = f"bring the text to {forms[0]}" if forms else "remove such characters from the text"
        raise DataError(
            f"{self._name}: the tokenizer is not lossless, so scores of this text would be wrong: {loss}; {fix}, or "
            "evaluate a model whose tokenizer changes no text"
        )

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(ids)
