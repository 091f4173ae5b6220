"""Scoring a checkpoint by one protocol: results.json with the totals, rows.jsonl with a line for each example."""

import time
from collections.abc import Callable, Sequence

from tost_lm.errors import ConfigError
from tost_lm.evaluation.data_sets import SetFile
from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.evaluation.likelihood import Likelihoods, score_requests
from tost_lm.evaluation.protocols import Example, Protocol, Row, is_gpt2s
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
    """Score the examples of a file, or reuse what is there; all ranks call it, and rank 0 writes.

    Args:
        load: gives the subject's model.
        window_tokens: that are read at once; None: as many as the model was trained for.

    Raises:
        ConfigError: the model cannot read so many.
        DataError: the file is not in the protocol's format.
    """
    started = time.monotonic()
    identity = subject.identity(None, None) | {"protocol": protocol.name, "data_sha256": file.sha256}
    identity["settings"] = {"window_tokens": window_tokens}
    if ranks.reusable(subject, protocol.name, identity):
        return
    model = load()
    limit, window = model.config.position_limit, window_tokens or model.config.max_positions
    if limit is not None and window > limit:
        raise ConfigError(f"zero_shot.window_tokens: {window} passes the model's positions ({limit})")
    tokenizer = subject.tokenizer()
    examples = protocol.examples(file.path, tokenizer, window)
    rows = score_rows(ranks, model, protocol, examples, batch_tokens)
    if ranks.rank > 0:
        return
    totals = protocol.totals(rows)
    for name, figure in totals.items():
        print(f"  {name} {figure:,}" if isinstance(figure, int) else f"  {name} {figure:.5g}")
    write_rows(subject.results_path(protocol.name).with_name("rows.jsonl"), rows)
    results = {
        "model": totals,
        "headline": protocol.headline,
        "by_token": protocol.by_token,
        "tokenizer_is_gpt2s": is_gpt2s(tokenizer),
        "window_tokens": window,
        "file": str(file.path),
        "file_is": file.source,
    }
    subject.write_results(protocol.name, identity, started, results)


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
