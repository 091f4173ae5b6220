"""The score of a checkpoint by one protocol: results.json with the totals, and rows.jsonl with a line per example.

During training, the same code scores the model in memory.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tost_lm.config import validate
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.eval.data_sets import SetFile, find_set_file
from tost_lm.eval.protocols import Example, Protocol, Row, find_protocol, is_gpt2_tokenizer
from tost_lm.eval.settings import DataSetsConfig
from tost_lm.files import write_rows
from tost_lm.inference.generation import LanguageModel, ModelFacts
from tost_lm.inference.likelihood import Likelihoods, continue_greedily, score_requests
from tost_lm.inference.protocol_names import HELDOUT
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.subject import Subject, describe_published
from tost_lm.parallel.apply import ShardedInference

if TYPE_CHECKING:
    from tost_lm.parallel.mesh import Mesh


def score_protocol(
    ranks: Ranks,
    subject: Subject,
    load: Callable[[], LanguageModel],
    protocol: Protocol,
    file: SetFile,
    window_tokens: int | None = None,
    batch_tokens: int | None = None,
) -> None:
    """Score the examples of a file, or reuse existing results. All ranks call it, and rank 0 writes.

    `published_file` in results.json is `SetFile.is_published`.

    Args:
        load: returns the subject's model.
        window_tokens: tokens that the model reads at once; None: model.context_length.

    Raises:
        CheckpointError: a score is not finite.
        ConfigError: the window is longer than the model's positions.
        DataError: the file does not have the protocol's format, or the tokenizer loses text of it.
    """
    started = time.monotonic()
    identity = subject.identity(None, None) | {"protocol": protocol.name, "data_sha256": file.sha256}
    identity["settings"] = {"window_tokens": window_tokens}
    if ranks.reusable(subject, protocol.name, identity):
        return
    ranks.beat()
    model = load()
    window = window_of(model.config, window_tokens)
    tokenizer = subject.lossless_tokenizer()
    examples = protocol.examples(file.path, tokenizer, window)
    print(f"{protocol.name}: {file.path}, {describe_published(file.is_published)} (SHA-256 {file.sha256})", flush=True)
    if protocol.new_tokens:
        print(f"{protocol.name}: continuing {len(examples):,} examples by {protocol.new_tokens} tokens", flush=True)
        rows = generate_rows(ranks, model, tokenizer, protocol, examples, batch_tokens)
    else:
        tokens = sum(request.inputs for example in examples for request in example.requests)
        print(f"{protocol.name}: scoring {len(examples):,} examples, {tokens:,} tokens", flush=True)
        rows = score_rows(ranks, model, protocol, examples, batch_tokens)
    if not all(np.isfinite(row.get("nats", 0)).all() for row in rows):
        raise CheckpointError(
            f"{subject.checkpoint}: its scores are not finite (NaN or infinite); use an earlier checkpoint"
        )
    if ranks.rank > 0:
        return
    totals = protocol.totals(rows)
    for name, value in totals.items():
        print(f"  {name} {value:,}" if isinstance(value, int) else f"  {name} {value:.5g}")
    write_rows(subject.results_path(protocol.name).with_name("rows.jsonl"), rows)
    results = {
        "model": totals,
        "headline": protocol.headline,
        "by_token": protocol.by_token,
        "tokenizer_is_gpt2s": is_gpt2_tokenizer(tokenizer),
        "window_tokens": window,
        "file": str(file.path),
        "published_file": file.is_published,
    }
    subject.write_results(protocol.name, identity, started, results)


def window_of(model: ModelFacts, wanted: int | None) -> int:
    """The tokens that a model reads at once; None: its context length. Raises ConfigError beyond its positions."""
    window, limit = wanted or model.context_length, model.position_limit
    if limit is not None and window > limit:
        raise ConfigError(f"zero_shot.window_tokens: {window} exceeds the model's positions ({limit}); lower it")
    return window


def generate_rows(
    ranks: Ranks,
    model: LanguageModel,
    tokenizer: Tokenizer,
    protocol: Protocol,
    examples: Sequence[Example],
    batch_tokens: int | None,
) -> list[Row]:
    """A row for each example of a protocol that generates text, on every rank; all of them call it."""
    prompts = [example.requests[0].context for example in examples]
    texts = continue_greedily(model, prompts, protocol.new_tokens, tokenizer.vocab_size, batch_tokens, ranks)
    return [protocol.row(example, tokenizer.decode(ids)) for example, ids in zip(examples, texts, strict=True)]


def score_rows(
    ranks: Ranks, model: LanguageModel, protocol: Protocol, examples: Sequence[Example], batch_tokens: int | None
) -> list[Row]:
    """A row for each example, on every rank; all of them call it."""
    requests = [request for example in examples for request in example.requests]
    scores = score_requests(model, requests, batch_tokens, ranks)
    rows, begin = [], 0
    for example in examples:
        here = slice(begin, begin + len(example.requests))
        rows.append(protocol.row(example, Likelihoods(*(column[here] for column in scores))))
        begin = here.stop
    return rows


@dataclass(frozen=True)
class ProtocolsInTraining:
    """Protocols with their files and examples."""

    protocols: Sequence[tuple[Protocol, SetFile, Sequence[Example]]]
    batch_tokens: int | None

    @classmethod
    def find(
        cls, names: Sequence[str], sets: Mapping[str, Path], tokenizer: Tokenizer, window: int, batch_tokens: int | None
    ) -> "ProtocolsInTraining":
        """The test sets of the recipe's section `evaluation`.

        Args:
            names: names of protocols.
            sets: files of test sets; others are downloaded.
            window: tokens that the model reads at once.

        Raises:
            ConfigError: a protocol or test set does not exist, or a file is not given and cannot be downloaded.
            DataError: a file is missing or does not have the protocol's format, or the tokenizer loses text of it.
        """
        given = validate(DataSetsConfig, {name: str(path) for name, path in sets.items()}, "evaluation.sets")
        if HELDOUT in names:
            raise ConfigError(
                f"evaluation.protocols: {HELDOUT} is measured only by tost eval zero-shot; set validation.every, "
                "which measures the loss on held-out documents"
            )
        protocols = [find_protocol(name, "evaluation.protocols") for name in dict.fromkeys(names)]
        if generating := [protocol.name for protocol in protocols if protocol.new_tokens]:
            raise ConfigError(
                f"evaluation.protocols: {generating[0]} generates text, which training does not; remove it, and "
                "measure checkpoints with tost eval zero-shot"
            )
        files = [find_set_file(protocol.data_set, given, "evaluation.sets") for protocol in protocols]
        examples = [each.examples(file.path, tokenizer, window) for each, file in zip(protocols, files, strict=True)]
        return cls(list(zip(protocols, files, examples, strict=True)), batch_tokens)

    @property
    def facts(self) -> dict[str, str]:
        """Facts that all ranks must agree on."""
        return {f"test set {protocol.data_set}": file.sha256 for protocol, file, _ in self.protocols}

    def measure(self, engine: Any, mesh: "Mesh", beat: Callable[[], None]) -> list[Row]:
        """The totals of each protocol as in its results.json, and the name of its headline.

        All ranks call it and get the same results; the copies of the model share the examples.

        Args:
            engine: of the model in training, at any ZeRO stage.
            beat: called before each protocol and each batch, equally often by all ranks.
        """
        model = ShardedInference(engine, engine.module.config, mesh)
        ranks = Ranks(engine.global_rank, mesh, beat)
        measured = []
        engine.eval()
        for protocol, file, examples in self.protocols:
            beat()
            rows = score_rows(ranks, model, protocol, examples, self.batch_tokens)
            names = {"protocol": protocol.name, "headline": protocol.headline, "data_sha256": file.sha256}
            measured.append(names | protocol.totals(rows))
        engine.train()
        return measured
