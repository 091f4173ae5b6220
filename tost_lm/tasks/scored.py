"""Tasks whose examples are scored by log-likelihood: a file in its published format becomes examples, and their scores
are summed up. During training, the same code scores the model in memory.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from tost_lm.config import Section
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import write_rows
from tost_lm.inference.evaluated import describe_published
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.requests import Likelihoods, Request
from tost_lm.markdown import format_result, table
from tost_lm.tasks.data_sets import DataSet, SetFile, unpacked
from tost_lm.tasks.evaluated_model import EvaluatedModel, checkpoint_of
from tost_lm.tasks.task import Family, Inputs, Measure, Measurement, Place, Row, Task

if TYPE_CHECKING:
    from tost_lm.inference.generation import LanguageModel, ModelFacts
    from tost_lm.page import Page

GPT2_SAMPLE, GPT2_EOT = [15496, 995, 11, 2125, 470, 340, 13130, 30], 50256


class WindowConfig(Section):
    """How test sets and held-out documents are read."""

    window_tokens: int | None = Field(default=None, gt=0)
    """Tokens that the model reads at once from a test set or a held-out document; default: model.context_length, or the length in the configuration of a Hugging Face model."""
    batch_tokens: int | None = Field(default=None, gt=0)
    """Tokens of a batch for each copy of the model; default: 8,192 on a GPU and 2,048 on a CPU. It changes memory and time, not the result."""


@dataclass(frozen=True)
class Example:
    requests: tuple[Request, ...]
    facts: Row
    """Entries of its row beside the scores."""


class LikelihoodTask(Task, ABC):
    """A task whose examples are scored by log-likelihood."""

    shares_copies = True

    @abstractmethod
    def row(self, example: Example, scores: Likelihoods) -> Row:
        """The row of an example; `scores` are those of its requests."""

    @abstractmethod
    def totals(self, rows: Sequence[Row]) -> Row:
        """The results, each with its denominator and a standard error."""

    def score(
        self,
        model: "LanguageModel",
        ranks: Ranks,
        place: Place | None,
        examples: Sequence[Example],
        settings: WindowConfig,
    ) -> Row:
        """The results of examples; also writes their rows if there is a place. Raises DataError without examples."""
        if not examples:
            raise DataError("the task has no examples; give it a file with some")
        tokens = sum(request.inputs for example in examples for request in example.requests)
        print(f"{self.name}: scoring {len(examples):,} examples, {tokens:,} tokens", flush=True)
        rows = rows_of(ranks, model, self, examples, settings.batch_tokens)
        # One example has no standard error.
        totals = {name: value for name, value in self.totals(rows).items() if value is not None}
        for name, value in totals.items():
            print(f"  {name} {value:,}" if isinstance(value, int) else f"  {name} {value:.5g}")
        if place and ranks.rank == 0:
            write_rows(place.folder / "rows.jsonl", rows)
        return {"model": totals, "headline": self.headline, "window_tokens": window_of(model.config, settings)}


class ScoredTask(LikelihoodTask):
    """One way to measure a model on one test set.

    Attributes:
        rules: the end of its name, after the test set.
        data_set: the test set.
        by_token: whether the headline depends on the tokenizer.
    """

    rules: str = "lm-eval"
    by_token: bool = False

    def __init__(self, data_set: DataSet, rules: str | None = None):
        self.data_set, self.name = data_set, f"{data_set.name}@{rules or self.rules}"

    @abstractmethod
    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        """All examples of a file, for a model that reads at most `window` tokens at once.

        Raises:
            DataError: the file has a different format, or the task cannot use such windows; names the file, and the
                line if there are lines.
        """

    def find_file(self, given: Mapping[str, Path], section: str = "sets") -> SetFile:
        """The file of its test set, as in `DataSet.find_file`."""
        return self.data_set.find_file(given, section)

    def open(self, inputs: Inputs, family: Family) -> Measurement:
        file, settings = self.find_file(inputs.config.sets, inputs.sets), inputs.config.zero_shot
        identity = {
            "protocol": self.name, "data_sha256": file.sha256, "settings": {"window_tokens": settings.window_tokens},
        }  # fmt: skip

        def prepare(model: "ModelFacts") -> Measure:
            examples = self.examples(file.path, inputs.lossless_tokenizer, window_of(model, settings))
            facts = {
                "by_token": self.by_token,
                "tokenizer_is_gpt2s": is_gpt2_tokenizer(inputs.lossless_tokenizer),
                "file": str(file.path),
                "published_file": file.is_published,
            }

            def measure(model: "LanguageModel", ranks: Ranks, place: Place | None) -> Row:
                published = describe_published(file.is_published)
                print(f"{self.name}: {file.path}, {published} (SHA-256 {file.sha256})", flush=True)
                return self.score(model, ranks, place, examples, settings) | facts

            return measure

        return Measurement(identity, prepare)


def window_of(model: "ModelFacts", settings: WindowConfig) -> int:
    """The tokens that a model reads at once. Raises ConfigError beyond its positions."""
    window, limit = settings.window_tokens or model.context_length, model.position_limit
    if limit is not None and window > limit:
        raise ConfigError(f"zero_shot.window_tokens: {window} exceeds the model's positions ({limit}); lower it")
    return window


def rows_of(
    ranks: Ranks,
    model: "LanguageModel",
    task: LikelihoodTask,
    examples: Sequence[Example],
    batch_tokens: int | None = None,
) -> list[Row]:
    """A row for each example, on every rank; all of them call it."""
    from tost_lm.inference.likelihood import score_requests

    requests = [request for example in examples for request in example.requests]
    scores = score_requests(model, requests, batch_tokens, ranks)
    rows, begin = [], 0
    for example in examples:
        here = slice(begin, begin + len(example.requests))
        rows.append(task.row(example, Likelihoods(*(column[here] for column in scores))))
        begin = here.stop
    return rows


def section_of_test_sets(run: EvaluatedModel, page: "Page") -> str:
    """The section of all tasks on test sets and held-out documents; empty without results."""
    rows = []
    for path in sorted(run.folder.glob("eval/*@*/results.json")):
        results = run.results(name := path.parent.name) or {}
        if "headline" not in results:
            continue
        headline, model = results["headline"], results["model"]
        score = format_result(headline, model)
        test_set = describe_published(results["published_file"]) if "published_file" in results else "–"
        examples = next((f"{model[key]:,}" for key in ("examples", "documents") if key in model), "–")
        rows.append((name, headline.replace("_", " "), score, examples, test_set, checkpoint_of(run, results)))
    if not rows:
        return ""
    scores = table(("task", "metric", "score", "examples", "test set", "checkpoint"), rows)
    return (
        f"## Test sets and held-out text\n\n{scores}\n\n± is the standard error over examples, parentheses of an "
        "accuracy are its 95 % interval over examples (Wilson's). `eval/TASK/results.json` has the other metrics with "
        "their denominators, and `rows.jsonl` each example."
    )


def is_gpt2_tokenizer(tokenizer: Tokenizer) -> bool:
    """Whether it encodes a sample text as GPT-2's tokenizer does."""
    return tokenizer.encode("Hello world, isn't it 2019?") == GPT2_SAMPLE and tokenizer.eot == GPT2_EOT


def read_text(path: Path) -> str:
    """A UTF-8 file, decompressed if its name ends in .gz. Raises DataError, naming file and line."""
    data = unpacked(path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x}); give the published file"
        ) from None


def read_json_lines(path: Path, expected: str) -> Iterator[tuple[str, Any]]:
    """The place, for error messages, and the value of each line. Raises DataError; `expected` describes the file."""
    text = read_text(path)
    lines = text.removesuffix("\n").split("\n")  # not splitlines: JSON strings may contain other line ends
    for number, line in enumerate(lines, start=1):
        try:
            yield f"{path}, line {number}", json.loads(line)
        except ValueError:
            raise wrong_format(path, text, expected, number) from None


def wrong_format(path: Path, text: str, expected: str, line: int = 1) -> DataError:
    """The error for a file of another format: how it begins, and what is expected."""
    return DataError(f"{path}, line {line}: wrong format, the file begins with {text[:30]!r}; give {expected}")


def to_array(rows: Sequence[Row], key: str) -> np.ndarray:
    """A column of rows, float64."""
    return np.array([row[key] for row in rows], dtype=np.float64)


def accuracy_of(rows: Sequence[Row]) -> Row:
    """The number of examples, and the fraction of those that are `right`, with its standard error (None for one
    example)."""
    right = to_array(rows, "right")
    error = float(right.std() / (len(rows) - 1) ** 0.5) if len(rows) > 1 else None
    return {"examples": len(rows), "accuracy": float(right.mean()), "accuracy_standard_error": error}
