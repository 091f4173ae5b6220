"""WikiText-2 and WikiText-103, raw test file, as Hugging Face's guide and as lm-evaluation-harness measure it."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.protocols.interface import Example, read_text, wrong_format
from tost_lm.evaluation.protocols.perplexity import TextProtocol, windows_of
from tost_lm.evaluation.windows import disjoint_windows, strided_windows


class StridedWikitext(TextProtocol):
    """`wikitext2@hf-strideN`: all rows as one text, in windows that begin N tokens apart; nats per token.

    Rows are lines with their line ends, or empty for lines without words. Two line ends join them. Words and bytes are
    those of the joined text. Its first token is not scored.
    """

    headline, by_token = "token_perplexity", True

    def __init__(self, data_set: str, stride: int):
        self.name, self.data_set, self.stride = f"{data_set}@hf-stride{stride}", data_set, stride

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        if self.stride > window:
            raise DataError(
                f"{self.name}: the stride is longer than a window of {window} tokens, so tokens would be left out; "
                "choose a smaller stride"
            )
        text = "\n\n".join(rows_of(path))
        return windows_of(strided_windows(tokenizer.encode_array(text), window, self.stride), len(text.split()), text)


class WikitextPages(TextProtocol):
    """`wikitext2@lm-eval`: each page separately and detokenized; words and bytes are those of the original page."""

    headline = "word_perplexity"

    def __init__(self, data_set: str):
        self.name, self.data_set = f"{data_set}@lm-eval", data_set

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        return [
            Example(
                tuple(
                    disjoint_windows(tokenizer.encode_array(detokenized(page)), tokenizer.eot, window, fill_last=True)
                ),
                {"words": len(re.split(r"\s+", page)), "bytes": len(page.encode())},
            )
            for page in pages(path)
        ]


def rows_of(path: Path) -> list[str]:
    """The rows of Hugging Face's data set: lines with their line ends, empty for lines without words. Raises
    DataError."""
    lines = _read_lines(path)
    if lines[-1] == "":
        lines.pop()
    return [f"{line}\n" if line.strip() else "" for line in lines]


def pages(path: Path) -> Iterator[str]:
    """The articles of the test file: lines from one first-level heading to the next. Raises DataError."""
    page: list[str] = []
    for line in _read_lines(path):
        if _is_title(line) and page:
            if any(part.strip() for part in page):
                yield "\n".join(page)
            page = []
        page.append(line)
    yield "\n".join(page)


def _read_lines(path: Path) -> list[str]:
    text = read_text(path)
    lines = text.split("\n")
    if "<unk>" in text or not any(map(_is_title, lines)):
        raise wrong_format(path, text, "wiki.test.raw of the raw release, with titles ' = Title = ' and without <unk>")
    return lines


def _is_title(line: str) -> bool:
    """Whether a line is `= Title =` and not `= = Section = =`."""
    words = line.split()
    return len(words) > 2 and words[0] == words[-1] == "=" and "=" not in (words[1], words[-2])


def detokenized(page: str) -> str:
    """The page without the spaces of WikiText's tokenizer, as the protocol defines it; the order matters."""
    text = page.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for opening, closing in ("()", "[]", "{}", '""', "''"):
        inside = rf"\s*([^{re.escape(closing)}]*?)\s*"
        text = re.sub(re.escape(opening) + inside + re.escape(closing), rf"{opening}\1{closing}", text)
    for level in (4, 3, 2):
        text = text.replace(" ".join("=" * level), "=" * level)
    for spaced, mark in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(spaced, mark)
    return text
