"""Scoring a checkpoint by one protocol: results.json with the totals, rows.jsonl with a line for each example."""

import time
from collections.abc import Callable
from pathlib import Path

from tost_lm.data.tokenizers import find_tokenizer, read_tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.evaluation.likelihood import Likelihoods, score_requests
from tost_lm.evaluation.protocols import Protocol
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.subject import Subject
from tost_lm.evaluation.zero_shot_config import ZeroShotConfig
from tost_lm.files import sha256_file, write_rows
from tost_lm.parallel.whole import LanguageModel


def file_of(protocol: Protocol, config: ZeroShotConfig) -> Path:
    """Raises ConfigError when it is not given, DataError when it is not there."""
    path: Path | None = getattr(config.sets, protocol.data_set)
    if path is None:
        what = type(config.sets).model_fields[protocol.data_set].description
        raise ConfigError(f"{protocol.name} needs a file: give sets.{protocol.data_set}=FILE ({what})")
    if not path.is_file():
        raise DataError(f"sets.{protocol.data_set} {path}: no such file")
    return path


def score_protocol(
    ranks: Ranks,
    subject: Subject,
    load: Callable[[], LanguageModel],
    protocol: Protocol,
    path: Path,
    batch_tokens: int,
) -> None:
    """Score the examples of a file, or reuse what is there; all ranks call it, and rank 0 writes.

    Args:
        load: gives the subject's model.

    Raises:
        DataError: the file is not in the protocol's format.
    """
    started = time.monotonic()
    identity = subject.identity(None, None) | {"protocol": protocol.name, "data_sha256": sha256_file(path)}
    if ranks.reusable(subject, protocol.name, identity):
        return
    model = load()
    window = model.config.max_positions
    examples = protocol.examples(path, read_tokenizer(find_tokenizer(subject.checkpoint)), window)
    requests = [request for example in examples for request in example.requests]
    tokens = sum(request.inputs for request in requests)
    print(f"{protocol.name}: scoring {len(examples):,} examples, {tokens:,} tokens", flush=True)
    scores = score_requests(model, requests, batch_tokens)
    if ranks.rank > 0:
        return
    rows, begin = [], 0
    for example in examples:
        here = slice(begin, begin + len(example.requests))
        rows.append(protocol.row(example, Likelihoods(*(column[here] for column in scores))))
        begin = here.stop
    totals = protocol.totals(rows)
    for name, figure in totals.items():
        print(f"  {name} {figure:,}" if isinstance(figure, int) else f"  {name} {figure:.5g}")
    write_rows(subject.results_path(protocol.name).with_name("rows.jsonl"), rows)
    results = {"model": totals, "headline": protocol.headline, "window": window, "file": str(path)}
    subject.write_results(protocol.name, identity, started, results)
