"""Penn Treebank, Mikolov's test file, detokenized and measured by word."""

import re
from collections.abc import Sequence
from pathlib import Path

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.protocols.interface import Example, read_text, wrong_format
from tost_lm.evaluation.protocols.perplexity import TextProtocol, windows_of
from tost_lm.evaluation.windows import disjoint_windows

MAX_CAPITALIZED = 0.01
"""Fraction of words with capital letters, N apart. The file has lower-case words."""


class PennTreebank(TextProtocol):
    """`ptb@megatron`: the whole text in disjoint windows after an end of text. The headline is word_perplexity over the
    words of the file and an end of each line, 82,430."""

    name, data_set, headline = "ptb@megatron", "ptb", "word_perplexity"

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        lines = [line.strip() for line in read_lines(path) if line.strip()]
        text = detokenized("\n".join(lines))
        words = sum(len(line.split()) + 1 for line in lines)
        return windows_of(disjoint_windows(tokenizer.encode_array(text), tokenizer.eot, window), words, text)


def read_lines(path: Path) -> list[str]:
    """The lines of the file, with the spaces around them. Raises DataError."""
    text = read_text(path)
    words = text.split()
    capitalized = sum(word != "N" and word != word.lower() for word in words)
    if not words or "{" in words[0] or capitalized > MAX_CAPITALIZED * len(words):
        raise wrong_format(path, text, "Mikolov's ptb.test.txt")
    return text.removesuffix("\n").split("\n")


def detokenized(text: str) -> str:
    """The text without the tokenizer's spaces. `N` becomes 1 and keeps its spaces, `<unk>` becomes a question mark."""
    for spaced, joined in ((" 's", "'s"), ("s ' ", "s' "), (" n't", "n't"), (r"\/", "/")):
        text = text.replace(spaced, joined)
    text = re.sub(r"(?<!\S)N(?!\S)", "1", text)
    for spaced, joined in (("$ 1", "$1"), ("# 1", "#1"), ("<unk>", "?")):
        text = text.replace(spaced, joined)
    return text
