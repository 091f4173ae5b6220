"""Penn Treebank, Mikolov's test file, with the spaces of its tokenizer taken out again; measured by word."""

import re
from collections.abc import Sequence
from pathlib import Path

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.protocols.interface import Example, read_text
from tost_lm.evaluation.protocols.perplexity import TextProtocol, windows_of
from tost_lm.evaluation.windows import disjoint_windows


class PennTreebank(TextProtocol):
    """`ptb@megatron`: the whole text in disjoint windows after an end of text; words are those of the file and an end
    for each line, 82,430, so word_perplexity is what is compared."""

    name, data_set, headline = "ptb@megatron", "ptb", "word_perplexity"

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        lines = sentences(path)
        text = detokenized("\n".join(lines))
        words = sum(len(line.split()) + 1 for line in lines)
        return windows_of(disjoint_windows(tokenizer.encode_array(text), tokenizer.eot, window), words, text)


def sentences(path: Path) -> list[str]:
    """The lines of the file without the spaces around them. Raises DataError."""
    lines = [line.strip() for line in read_text(path).split("\n") if line.strip()]
    if not lines:
        raise DataError(f"{path}: no text; give ptb.test.txt")
    return lines


def detokenized(text: str) -> str:
    """`N`, a number, becomes 1 and keeps its spaces, `<unk>` a question mark."""
    for spaced, joined in ((" 's", "'s"), ("s ' ", "s' "), (" n't", "n't"), (r"\/", "/")):
        text = text.replace(spaced, joined)
    text = re.sub(r"(?<!\S)N(?!\S)", "1", text)
    for spaced, joined in (("$ 1", "$1"), ("# 1", "#1"), ("<unk>", "?")):
        text = text.replace(spaced, joined)
    return text
