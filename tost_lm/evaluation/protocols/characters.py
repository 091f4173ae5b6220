"""enwik8 and text8: the last five million of a hundred million bytes, in bits per byte or character."""

import re
from collections.abc import Sequence
from pathlib import Path

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.data_sets import PUBLISHED_BYTES
from tost_lm.evaluation.protocols.interface import Example, read_text, wrong_format
from tost_lm.evaluation.protocols.perplexity import TextProtocol, windows_of
from tost_lm.evaluation.windows import disjoint_windows

TEST_BYTES = 5_000_000


class LastBytes(TextProtocol):
    """`enwik8@bpb` and `text8@bpc`: the test bytes in disjoint windows after an end of text. The headline is
    bits_per_byte; text8 has one byte per character."""

    headline = "bits_per_byte"

    def __init__(self, name: str):
        self.name, self.data_set = name, name.split("@")[0]

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        whole = read_text(path)
        data, expected = whole.encode(), f"the whole file {self.data_set}"
        if not TEST_BYTES < len(data) <= PUBLISHED_BYTES[self.data_set]:
            raise DataError(
                f"{path}: {len(data):,} bytes; give {expected} ({PUBLISHED_BYTES[self.data_set]:,} bytes), whose last "
                f"{TEST_BYTES:,} bytes are the test set"
            )
        if self.data_set == "enwik8" and not whole.startswith("<mediawiki"):
            raise wrong_format(path, whole, expected)
        if self.data_set == "text8" and (other := re.search(rb"[^a-z ]", data[-TEST_BYTES:])):
            at, byte = len(data) - TEST_BYTES + other.start(), ascii(other[0])[1:]
            raise DataError(
                f"{path}: {byte} at byte {at:,}, but text8 has only letters a to z and spaces; give {expected}"
            )
        text = data[-TEST_BYTES:].decode(errors="ignore")
        windows = disjoint_windows(tokenizer.encode_array(text), tokenizer.eot, window)
        return windows_of(windows, len(text.split()), text)
