"""The score of a checkpoint by one protocol: results.json with the totals, and rows.jsonl with a line per example."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.evaluation.data_sets import SetFile, describe_published
from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.evaluation.likelihood import Likelihoods, continue_greedily, score_requests
from tost_lm.evaluation.protocols import Example, Protocol, Row, is_gpt2_tokenizer
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.subject import Subject
from tost_lm.files import write_rows


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
        window_tokens: tokens that the model reads at once; None: model.max_positions.

    Raises:
        CheckpointError: a score is not finite.
        ConfigError: the window is longer than the model's positions.
        DataError: the file does not have the protocol's format.
    """
    started = time.monotonic()
    identity = subject.identity(None, None) | {"protocol": protocol.name, "data_sha256": file.sha256}
    identity["settings"] = {"window_tokens": window_tokens}
    if ranks.reusable(subject, protocol.name, identity):
        return
    ranks.beat()
    model = load()
    limit, window = model.config.position_limit, window_tokens or model.config.max_positions
    if limit is not None and window > limit:
        raise ConfigError(f"zero_shot.window_tokens: {window} exceeds the model's positions ({limit}); lower it")
    tokenizer = subject.tokenizer()
    examples = protocol.examples(file.path, tokenizer, window)
    print(f"{protocol.name}: {file.path}, {describe_published(file.is_published)} (SHA-256 {file.sha256})", flush=True)
    if protocol.new_tokens:
        rows = generate_rows(ranks, model, tokenizer, protocol, examples, batch_tokens)
    else:
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


def generate_rows(
    ranks: Ranks,
    model: LanguageModel,
    tokenizer: Tokenizer,
    protocol: Protocol,
    examples: Sequence[Example],
    batch_tokens: int | None,
) -> list[Row]:
    """A row for each example of a protocol that generates text, on every rank; all of them call it."""
    print(f"{protocol.name}: continuing {len(examples):,} examples by {protocol.new_tokens} tokens", flush=True)
    prompts = [example.requests[0].context for example in examples]
    texts = continue_greedily(model, prompts, protocol.new_tokens, tokenizer.vocab_size, batch_tokens, ranks)
    return [protocol.row(example, tokenizer.decode(ids)) for example, ids in zip(examples, texts, strict=True)]


def score_rows(
    ranks: Ranks, model: LanguageModel, protocol: Protocol, examples: Sequence[Example], batch_tokens: int | None
) -> list[Row]:
    """A row for each example, on every rank; all of them call it."""
    requests = [request for example in examples for request in example.requests]
    tokens = sum(request.inputs for request in requests)
    print(f"{protocol.name}: scoring {len(examples):,} examples, {tokens:,} tokens", flush=True)
    scores = score_requests(model, requests, batch_tokens, ranks)
    rows, begin = [], 0
    for example in examples:
        here = slice(begin, begin + len(example.requests))
        rows.append(protocol.row(example, Likelihoods(*(column[here] for column in scores))))
        begin = here.stop
    return rows
