"""The score on held-out text: every token of every document predicted exactly once.

A held-out document is read as [EOT] + its tokens, in disjoint windows. The first input of a window is the last token of
the window before it. EOT is only an input and is not scored.
"""

import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tost_lm.config import TAKES_URLS, Section
from tost_lm.data.shard_format import counted_tokens
from tost_lm.data.shards import Shards
from tost_lm.errors import ConfigError
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.requests import Likelihoods, bootstrap_error, disjoint_windows, rates
from tost_lm.tasks.scored import Example, LikelihoodTask, section_of_test_sets, to_array, window_of
from tost_lm.tasks.task import Family, Inputs, Measure, Measurement, Place, Row

if TYPE_CHECKING:
    from tost_lm.inference.generation import LanguageModel, ModelFacts

NAME = "heldout@bpb"


class HeldoutConfig(Section):
    """The held-out text, of task `heldout@bpb` and of all others that read it."""

    shards: Annotated[str, TAKES_URLS] = ""
    """Shard folder whose `valid` split is used; empty: the training shards of the run."""
    max_documents: int = Field(default=0, ge=0)
    """Number of held-out documents that heldout@bpb scores, from the first on; 0: all."""


class Heldout(LikelihoodTask):
    """Its examples are the documents."""

    name, about = NAME, "bits per byte of the held-out documents"
    headline, column = "bits_per_byte", ("held-out bits per byte", ".4f")

    def open(self, inputs: Inputs, family: Family) -> Measurement:
        settings, windows, shards = inputs.config.heldout, inputs.config.zero_shot, inputs.open_shards()
        valid = shards.manifest["splits"]["valid"]
        if counted_tokens(valid) < valid["tokens"]:
            raise ConfigError(
                f"{NAME}: only some tokens of {shards.folder} count in the loss, and it scores all of a text; give "
                "shards of text (heldout.shards=FOLDER), or read the loss of answers in training (validation.interval)"
            )
        if valid["bytes"] is None:
            raise ConfigError(
                f"{NAME}: {shards.folder} links token files, so the bytes of its documents are unknown; give shards of "
                "text (heldout.shards=FOLDER), or read the loss of held-out documents in training (validation.interval)"
            )
        identity = {"settings": settings.model_dump(mode="json") | {"window_tokens": windows.window_tokens}}

        def measure(model: "LanguageModel", ranks: Ranks, place: Place | None) -> Row:
            examples = documents(shards, settings.max_documents, window_of(model.config, windows))
            results = self.score(model, ranks, place, examples, windows)
            return results | {"heldout_documents": shards.manifest["splits"]["valid"]["documents"]}

        def prepare(model: "ModelFacts") -> Measure:
            window_of(model, windows)
            return measure

        return Measurement(identity, prepare, shards)

    def row(self, example: Example, scores: Likelihoods) -> Row:
        return {"tokens": int(scores.tokens.sum()), **example.facts, "nats": float(sum(scores.nats))}

    def totals(self, rows: Sequence[Row]) -> Row:
        """Nats per token, perplexity and bits per byte, with their denominators and a standard error."""
        nats, size = to_array(rows, "nats"), to_array(rows, "bytes")
        return {
            "documents": len(rows),
            **rates(float(nats.sum()), sum(row["tokens"] for row in rows), sum(row["bytes"] for row in rows)),
            "bits_per_byte_standard_error": bootstrap_error(nats / math.log(2), size),
        }


def documents(shards: Shards, most: int, window: int) -> list[Example]:
    """The first `most` held-out documents (0: all) in windows of `window` tokens."""
    tokenizer = shards.tokenizer()
    return [
        Example(
            tuple(disjoint_windows(ids, tokenizer.eot, window)), {"bytes": len(tokenizer.decode(ids.tolist()).encode())}
        )
        for ids in islice(shards.documents("valid"), most or None)
    ]


FAMILY = Family("heldout", [Heldout()], HeldoutConfig, section_of_test_sets)
