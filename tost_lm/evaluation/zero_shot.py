"""Scoring a checkpoint by one protocol: results.json with the totals, rows.jsonl with a line for each example."""

import time
from collections.abc import Callable, Sequence

from tost_lm.evaluation.data_sets import SetFile
from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.evaluation.likelihood import Likelihoods, score_requests
from tost_lm.evaluation.protocols import Example, Protocol, Row
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.subject import Subject
from tost_lm.files import write_rows


def score_protocol(
    ranks: Ranks,
    subject: Subject,
    load: Callable[[], LanguageModel],
    protocol: Protocol,
    file: SetFile,
    batch_tokens: int | None,
) -> None:
    """Score the examples of a file, or reuse what is there; all ranks call it, and rank 0 writes.

    Args:
        load: gives the subject's model.

    Raises:
        DataError: the file is not in the protocol's format.
    """
    started = time.monotonic()
    identity = subject.identity(None, None) | {"protocol": protocol.name, "data_sha256": file.sha256}
    if ranks.reusable(subject, protocol.name, identity):
        return
    model = load()
    examples = protocol.examples(file.path, subject.tokenizer(), model.config.max_positions)
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
        "window": model.config.max_positions,
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
