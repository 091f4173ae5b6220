"""WikiText-2 and WikiText-103, raw test file, as Hugging Face's guide and as lm-evaluation-harness measure it."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.protocols.interface import Example, read_text
from tost_lm.evaluation.protocols.perplexity import TextProtocol, windows_of
from tost_lm.evaluation.windows import disjoint_windows, strided_windows


class StridedWikitext(TextProtocol):
    """`wikitext2@hf-strideN`: one text of all rows, in windows that begin N tokens apart.

    Rows are lines with their line ends, those without words empty, joined by two line ends; the measure is nats a
    token. The words and bytes are those of the text as it is joined, whose first token is scored nowhere.
    """

    headline, by_token = "token_perplexity", True

    def __init__(self, data_set: str, stride: int):
        self.name, self.data_set, self.stride = f"{data_set}@hf-stride{stride}", data_set, stride

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        if self.stride > window:
            raise DataError(
                f"{self.name}: windows of {window} tokens, which the model reads at once, leave some out: choose a "
                "smaller stride"
            )
        text = "\n\n".join(rows_of(path))
        return windows_of(strided_windows(tokenizer.encode_array(text), window, self.stride), len(text.split()), text)


class WikitextPages(TextProtocol):
    """`wikitext2@lm-eval`: each page detokenized and by itself; words and bytes are those of the page as it was."""

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
    """The rows of Hugging Face's dataset: lines with their line ends, those without words empty. Raises DataError."""
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    if not any(line.strip() for line in lines):
        raise DataError(f"{path}: no text; give wiki.test.raw of the raw release")
    return [f"{line}\n" if line.strip() else "" for line in lines]


def pages(path: Path) -> Iterator[str]:
    """The articles of the test file: lines from a heading of the first level to the next one. Raises DataError."""
    page: list[str] = []
    for line in read_text(path).split("\n"):
        if _is_title(line) and page:
            if any(part.strip() for part in page):
                yield "\n".join(page)
            page = []
        page.append(line)
    if not any(part.strip() for part in page):
        raise DataError(f"{path}: no text; give wiki.test.raw of the raw release")
    yield "\n".join(page)


def _is_title(line: str) -> bool:
    """Whether a line is `= Title =` and not `= = Section = =`."""
    words = line.split()
    return len(words) > 2 and words[0] == words[-1] == "=" and "=" not in (words[1], words[-2])


def detokenized(page: str) -> str:
    """A page as it is tokenized by the protocol: spaces of WikiText's own tokenizer taken out again, in this order."""
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
