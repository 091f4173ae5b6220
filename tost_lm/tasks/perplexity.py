"""Running text: nats per token, word and byte, each with its denominator.

WikiText-2 (raw test file, also that of WikiText-103) as the guide of Hugging Face and as lm-evaluation-harness measure
it; Penn Treebank, the test file of Mikolov, detokenized; the validation tokens of OpenWebText that the script of
nanoGPT writes.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.inference.requests import (
    Likelihoods,
    Request,
    bootstrap_error,
    disjoint_windows,
    perplexity,
    strided_windows,
)
from tost_lm.tasks.data_sets import CONVERTED, DataSet, HubSource, unpacked
from tost_lm.tasks.scored import (
    GPT2_EOT,
    Example,
    ScoredTask,
    is_gpt2_tokenizer,
    read_text,
    section_of_test_sets,
    to_array,
    wrong_format,
)
from tost_lm.tasks.task import Family, Row, Task


class RunningText(ScoredTask):
    """Scores each target token once. Examples are texts with `words` and `bytes` in their facts, or windows of one
    text, the first of which has those of the whole text."""

    def row(self, example: Example, scores: Likelihoods) -> Row:
        return {"tokens": int(scores.tokens.sum()), **example.facts, "nats": float(scores.nats.sum())}

    def totals(self, rows: Sequence[Row]) -> Row:
        nats, tokens = to_array(rows, "nats"), to_array(rows, "tokens")
        words, size = (sum(row.get(key, 0) for row in rows) for key in ("words", "bytes"))
        total, count = float(nats.sum()), int(tokens.sum())
        error = bootstrap_error(nats, tokens)
        per = lambda number: None if error is None else error * count / number
        totals = {
            "examples": len(rows),
            "tokens": count,
            "nats": total,
            "nats_per_token": total / count,
            "nats_per_token_standard_error": error,
            **with_error("token_perplexity", total / count, error),
        }
        if not size:
            return totals
        return totals | {
            "words": words,
            "bytes": size,
            **with_error("word_perplexity", total / words, per(words)),
            **with_error("byte_perplexity", total / size, per(size)),
            "bits_per_byte": total / size / math.log(2),
            "bits_per_byte_standard_error": per(size * math.log(2)),
        }


def windows_of(windows: Iterable[Request], words: int, text: str) -> list[Example]:
    """Examples for the windows of one text, which has `words` words."""
    facts = {"words": words, "bytes": len(text.encode())}
    return [Example((window,), {} if number else facts) for number, window in enumerate(windows)]


def with_error(name: str, nats: float, error: float | None) -> Row:
    """The perplexity of mean nats and its standard error, from that of the nats to first order, if there is one."""
    value = perplexity(nats)
    return {name: value, f"{name}_standard_error": None if error is None else value * error}


class StridedWikitext(RunningText):
    """`wikitext2@hf-strideN`: all rows as one text, in windows that begin N tokens apart; nats per token.

    Rows are lines with their line ends, or empty for lines without words. Two line ends join them. Words and bytes are
    those of the joined text. Its first token is not scored.
    """

    about = "perplexity per token of all rows, in windows N tokens apart"
    headline, by_token = "token_perplexity", True

    def __init__(self, data_set: DataSet, stride: int = 1024):
        super().__init__(data_set, f"hf-stride{stride}")
        self.stride, self.pattern = stride, f"{data_set.name}@hf-strideN"

    def named(self, name: str) -> Task | None:
        found = re.fullmatch(rf"{self.data_set.name}@hf-stride([1-9]\d*)", name)
        return StridedWikitext(self.data_set, int(found[1])) if found else None

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        if self.stride > window:
            raise DataError(
                f"{self.name}: the stride is longer than a window of {window} tokens, so tokens would be left out; "
                "choose a smaller stride"
            )
        text = "\n\n".join(wikitext_rows(path))
        return windows_of(strided_windows(tokenizer.encode_array(text), window, self.stride), len(text.split()), text)


class WikitextPages(RunningText):
    """`wikitext2@lm-eval`: each page separately and detokenized; words and bytes are those of the original page."""

    about = "perplexity per word of each page, detokenized"
    headline = "word_perplexity"

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        return [
            Example(
                tuple(
                    disjoint_windows(
                        tokenizer.encode_array(detokenized_wikitext(page)), tokenizer.eot, window, fill_last=True
                    )
                ),
                {"words": len(re.split(r"\s+", page)), "bytes": len(page.encode())},
            )
            for page in pages(path)
        ]


def wikitext_rows(path: Path) -> list[str]:
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


def detokenized_wikitext(page: str) -> str:
    """The page without the spaces of WikiText's tokenizer, as the task defines it; the order matters."""
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


MAX_CAPITALIZED = 0.01
"""Fraction of words with capital letters, N apart. The file has lower-case words."""


class PennTreebank(RunningText):
    """`ptb@megatron`: the whole text in disjoint windows after an end of text. The headline is word_perplexity over the
    words of the file and an end of each line, 82,430."""

    about = "perplexity per word, detokenized"
    rules, headline = "megatron", "word_perplexity"

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        lines = [line.strip() for line in ptb_lines(path) if line.strip()]
        text = detokenized_ptb("\n".join(lines))
        words = sum(len(line.split()) + 1 for line in lines)
        return windows_of(disjoint_windows(tokenizer.encode_array(text), tokenizer.eot, window), words, text)


def ptb_lines(path: Path) -> list[str]:
    """The lines of the file, with the spaces around them. Raises DataError."""
    text = read_text(path)
    words = text.split()
    capitalized = sum(word != "N" and word != word.lower() for word in words)
    if not words or "{" in words[0] or capitalized > MAX_CAPITALIZED * len(words):
        raise wrong_format(path, text, "Mikolov's ptb.test.txt")
    return text.removesuffix("\n").split("\n")


def detokenized_ptb(text: str) -> str:
    """The text without the tokenizer's spaces. `N` becomes 1 and keeps its spaces, `<unk>` becomes a question mark."""
    for spaced, joined in ((" 's", "'s"), ("s ' ", "s' "), (" n't", "n't"), (r"\/", "/")):
        text = text.replace(spaced, joined)
    text = re.sub(r"(?<!\S)N(?!\S)", "1", text)
    for spaced, joined in (("$ 1", "$1"), ("# 1", "#1"), ("<unk>", "?")):
        text = text.replace(spaced, joined)
    return text


class OpenWebText(RunningText):
    """`owt@nanogpt`: nats per token of val.bin, GPT-2's ids as 16-bit integers with an end of text after each document.

    Each token but the first is scored once, in disjoint windows. Ends of text count. The file has no words and bytes.
    nanoGPT itself averages random windows, whose expectation this is.
    """

    about = "nats per token of nanoGPT's val.bin"
    rules, headline, by_token = "nanogpt", "nats_per_token", True

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        ids = openwebtext_ids(path, tokenizer)
        return [Example((request,), {}) for request in disjoint_windows(ids[1:], int(ids[0]), window)]


def openwebtext_ids(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of val.bin, int64. Raises DataError if the format differs or the tokenizer is not GPT-2's."""
    if not is_gpt2_tokenizer(tokenizer):
        raise DataError(f"{path}: has ids of GPT-2's tokenizer, but the model has another; leave this task out")
    data = unpacked(path)
    ids = np.frombuffer(data[: len(data) // 2 * 2], dtype="<u2")
    # ASCII text has no end of text among its pairs of bytes.
    if len(data) % 2 or len(ids) < 2 or ids.max() != GPT2_EOT:
        raise DataError(
            f"{path}: wrong format, not ids of GPT-2's tokenizer as 16-bit integers with ends of text; give val.bin"
        )
    return ids.astype(np.int64)


def _line_of_wikitext(row: dict[str, Any]) -> str:
    return row["text"] or " \n"


def _line_of_ptb(row: dict[str, Any]) -> str:
    return f" {row['sentence'].strip()} \n"


WIKITEXT2 = DataSet(
    "wikitext2",
    "wiki.test.raw of the raw release of WikiText-2 or WikiText-103, which is the same file",
    HubSource("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "wiki2.test.raw", _line_of_wikitext),
    sha256="173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    texts=pages,
)
PTB = DataSet(
    "ptb",
    "Mikolov's ptb.test.txt",
    HubSource("ptb-text-only/ptb_text_only", None, "test", "ptb.test.txt", _line_of_ptb, CONVERTED),
    texts=ptb_lines,
)
OWT = DataSet(
    "owt",
    "val.bin of OpenWebText from nanoGPT's preparation script: 4,434,897 ids of GPT-2's tokenizer, 16 bits each",
    bytes=2 * 4_434_897,
)

FAMILY = Family(
    "perplexity",
    [
        StridedWikitext(WIKITEXT2),
        WikitextPages(WIKITEXT2),
        PennTreebank(PTB),
        OpenWebText(OWT),
    ],
    section=section_of_test_sets,
)
