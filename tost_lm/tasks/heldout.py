"""The score on held-out text: every token of every document predicted exactly once.

A held-out document is read as [EOT] + its tokens, in disjoint windows. The first input of a window is the last token of
the window before it. EOT is only an input and is not scored.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from tost_lm.config import TAKES_URLS, Section
from tost_lm.data.shards import Shards
from tost_lm.errors import ConfigError
from tost_lm.files import write_rows
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.requests import bootstrap_error, disjoint_windows, rates
from tost_lm.markdown import escape, table, with_error
from tost_lm.page import Page
from tost_lm.tasks.scored import window_of
from tost_lm.tasks.sections import EvaluatedModel, checkpoint_line
from tost_lm.tasks.task import Evaluation, Family, MeasuredInTraining, Measurement, Row, Task, Training

if TYPE_CHECKING:
    from tost_lm.inference.generation import LanguageModel

NAME = "heldout@bpb"


class HeldoutConfig(Section):
    """The held-out text, of task `heldout@bpb` and of all others that read it."""

    shards: Annotated[str, TAKES_URLS] = ""
    """Shard folder whose `valid` split is used; empty: the training shards of the run."""
    max_documents: int = Field(default=0, ge=0)
    """Number of held-out documents that heldout@bpb scores, from the first on; 0: all."""


class Heldout(Task):
    """Beside results.json it writes documents.jsonl, a line for each document."""

    name, about = NAME, "bits per byte of the held-out documents"
    headline, column = "bits_per_byte", ("held-out bits per byte", ".4f")

    def open(self, evaluation: Evaluation, family: Family) -> Measurement:
        settings, window = evaluation.config.heldout, evaluation.config.zero_shot
        shards = evaluation.evaluated.open_shards(settings.shards)
        if shards.manifest["splits"]["valid"]["bytes"] is None:
            raise ConfigError(
                f"{NAME}: {shards.folder} links token files, so the bytes of its documents are unknown; give shards of "
                "text (heldout.shards=FOLDER), or read the loss of held-out documents in training (validation.every)"
            )
        identity = evaluation.evaluated.identity(settings, shards)
        identity["settings"] |= {"window_tokens": window.window_tokens}
        measure = partial(self._measure, evaluation, settings, window, shards)
        return Measurement(identity, measure, partial(window_of, wanted=window.window_tokens))

    def _measure(
        self, evaluation: Evaluation, settings: HeldoutConfig, windows: Any, shards: Shards
    ) -> Callable[[], Row]:
        tokenizer, model = shards.tokenizer(), evaluation.model
        documents = list(islice(shards.documents("valid"), settings.max_documents or None))
        sizes = [len(tokenizer.decode(tokens.tolist()).encode()) for tokens in documents]
        print(f"scoring {len(documents):,} held-out documents, {sum(map(len, documents)):,} tokens", flush=True)
        window = window_of(model.config, windows.window_tokens)
        scores = score_documents(model, documents, sizes, tokenizer.eot, window, windows.batch_tokens, evaluation.ranks)

        def finish() -> Row:
            totals = scores.totals()
            write_rows(evaluation.folder(NAME) / "documents.jsonl", scores.rows())
            print(
                f"{totals['bits_per_byte']:.4f} ± {totals['bits_per_byte_standard_error']:.4f} bits/byte, "
                f"{totals['nats_per_token']:.4f} nats/token, perplexity {totals['perplexity_per_token']:,.2f} over "
                f"{totals['documents']} documents, {totals['bytes']:,} bytes"
            )
            return {
                "model": totals,
                "headline": self.headline,
                "window_tokens": window,
                "heldout_documents": shards.manifest["splits"]["valid"]["documents"],
            }

        return finish

    def in_training(self, training: Training, family: Family) -> MeasuredInTraining:
        raise ConfigError(
            f"evaluation.tasks: {NAME} is not measured during training; set validation.every, which measures the loss "
            "on held-out documents"
        )


@dataclass(frozen=True)
class DocumentScores:
    """Scores of documents, in their order: summed nats (float64), tokens and bytes (int64), each [documents]."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray

    def totals(self) -> dict[str, Any]:
        """Nats per token, perplexity and bits per byte, with their denominators and a standard error."""
        return {
            "documents": len(self.nats),
            **rates(float(self.nats.sum()), int(self.tokens.sum()), int(self.bytes.sum())),
            "bits_per_byte_standard_error": bootstrap_error(self.nats / math.log(2), self.bytes),
        }

    def rows(self) -> list[Row]:
        """A row for each document."""
        columns = zip(self.tokens, self.bytes, self.nats, strict=True)
        return [
            {"document": number, "tokens": int(tokens), "bytes": int(size), "nats": float(nats)}
            for number, (tokens, size, nats) in enumerate(columns)
        ]


def score_documents(
    model: "LanguageModel",
    documents: Sequence[np.ndarray],
    sizes: Sequence[int],
    eot: int,
    window: int,
    batch_tokens: int | None = None,
    ranks: Ranks | None = None,
) -> DocumentScores:
    """Score documents (ids without EOT; `sizes`: bytes of their text) in windows of `window` tokens, with a model in
    evaluation mode."""
    from tost_lm.inference.likelihood import score_requests

    requests = [
        (number, request)
        for number, tokens in enumerate(documents)
        for request in disjoint_windows(tokens, eot, window)
    ]
    scores = score_requests(model, [request for _, request in requests], batch_tokens, ranks)
    nats = np.zeros(len(documents))
    np.add.at(nats, [number for number, _ in requests], scores.nats)
    counts = np.array([len(tokens) for tokens in documents], dtype=np.int64)
    return DocumentScores(nats, counts, np.array(sizes, dtype=np.int64))


def section(run: EvaluatedModel, page: Page) -> str:
    """Held-out scores of the model; empty without results."""
    results = run.results(NAME)
    if results is None:
        return ""
    model = results["model"]
    bits = with_error(model["bits_per_byte"], model["bits_per_byte_standard_error"], ".4f")
    row = (f"{model['nats_per_token']:.4f}", f"{model['perplexity_per_token']:,.2f}", bits)
    return "\n\n".join([
        f"## Held-out text ({escape(NAME)})",
        checkpoint_line(run, results),
        table(("nats per token", "perplexity per token", "bits per byte"), [row]),
        f"{model['documents']:,} of {results['heldout_documents']:,} held-out documents, "
        f"{model['tokens']:,} tokens, {model['bytes']:,} bytes, in windows of {results['window_tokens']:,} tokens. "
        "Each token is predicted once; end-of-text tokens do not count. ± is the bootstrap standard error over "
        "documents.",
    ])  # fmt: skip


FAMILY = Family("heldout", [Heldout()], HeldoutConfig, section)
