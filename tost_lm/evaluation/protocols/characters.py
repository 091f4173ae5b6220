"""enwik8 and text8: the last five million bytes of a hundred million, in bits a byte or character."""

import re
from collections.abc import Sequence
from pathlib import Path

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.protocols.interface import Example, read_text
from tost_lm.evaluation.protocols.perplexity import TextProtocol, windows_of
from tost_lm.evaluation.windows import disjoint_windows

TEST_BYTES = 5_000_000


class LastBytes(TextProtocol):
    """`enwik8@bpb` and `text8@bpc`: the test part in disjoint windows after an end of text; bits_per_byte is what is
    compared, and text8 has a byte for each character."""

    headline = "bits_per_byte"

    def __init__(self, name: str):
        self.name, self.data_set = name, name.split("@")[0]

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        data = read_text(path).encode()
        if len(data) <= TEST_BYTES:
            raise DataError(
                f"{path}: {len(data):,} bytes; give all of {self.data_set}, whose last {TEST_BYTES:,} are the test part"
            )
        if self.data_set == "text8" and (other := re.search(rb"[^a-z ]", data[-TEST_BYTES:])):
            at, byte = len(data) - TEST_BYTES + other.start(), ascii(other[0])[1:]
            raise DataError(f"{path}: {byte} at byte {at:,}; text8 is of the letters a to z and spaces alone")
        text = data[-TEST_BYTES:].decode(errors="ignore")
        windows = disjoint_windows(tokenizer.encode_array(text), tokenizer.eot, window)
        return windows_of(windows, len(text.split()), text)
