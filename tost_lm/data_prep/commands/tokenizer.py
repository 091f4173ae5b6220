"""Train a lossless SentencePiece tokenizer on the training documents of a corpus, or reuse an existing one.

    tost prepare tokenizer configs/data/embedded.toml
    tost prepare tokenizer configs/data/embedded.toml tokenizer.vocab_size=8192

Writes the model to tokenizer.path, and a record of its settings and corpus to tokenizer.path with .json.
"""

import time
from pathlib import Path
from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.sources import fingerprint, left_out_files
from tost_lm.data.sources.blocks import corpus_changed
from tost_lm.data.tokenizers import SentencePieceTokenizer
from tost_lm.data.tokenizers.lossless import first_loss
from tost_lm.data.tokenizers.training import (
    retrain_reason,
    sample_texts,
    train_sentencepiece,
    write_tokenizer,
)
from tost_lm.errors import ConfigError, DataError
from tost_lm.progress import ProgressBar

CHECKED_BYTES = 8_000_000  # takes a few seconds


def main(_: Path | None, config: DataPrepConfig) -> None:
    """Train the tokenizer, check that it is lossless, write it."""
    path, vocab_size = config.tokenizer.path, config.tokenizer.vocab_size
    if vocab_size is None:
        raise ConfigError(
            "tokenizer.vocab_size: not set; set the size of the vocabulary to train, for example 32768, or run tost "
            "prepare shards, which uses a tokenizer as it is"
        )
    corpus_fingerprint = fingerprint(config.corpus)
    if left_out := left_out_files(config.corpus.source):
        print(left_out)
    reason = retrain_reason(config, corpus_fingerprint)
    if reason is None:
        print(f"reusing {path}: same settings and corpus")
        return
    print(f"training {path}: {reason}", flush=True)
    start = time.monotonic()
    with ProgressBar("reading", "B") as progress:
        sample = sample_texts(config, progress)
    if fingerprint(config.corpus) != corpus_fingerprint:
        raise corpus_changed(config.corpus)
    texts = (text.decode() for text in sample.texts)
    tokenizer = SentencePieceTokenizer(train_sentencepiece(texts, vocab_size))
    bytes_per_token = check_lossless(tokenizer, sample.texts)
    sample_bytes = sum(map(len, sample.texts))
    write_tokenizer(config, corpus_fingerprint, tokenizer.model_bytes, len(sample.texts), sample_bytes)
    print(
        f"{path}: {tokenizer.vocab_size} pieces from {len(sample.texts):,} of {sample.documents:,} training documents, "
        f"{sample_bytes:,} bytes; {bytes_per_token:.3f} bytes per token; {time.monotonic() - start:.1f} s"
    )
    if sample.bad_rows:
        print(f"unreadable rows left out: {sample.bad_rows:,}")


def check_lossless(tokenizer: SentencePieceTokenizer, texts: list[bytes]) -> float:
    """Bytes per token of the first `texts`. Raises DataError if decoding does not return a text exactly."""
    checked = tokens = 0
    for text in texts:
        ids = tokenizer.encode(text.decode())
        if loss := first_loss(text.decode(), tokenizer.decode(ids)):
            raise DataError(f"the trained tokenizer is not lossless: {loss}; nothing was written")
        tokens += len(ids)
        checked += len(text)
        if checked >= CHECKED_BYTES:
            break
    return checked / tokens


def run() -> NoReturn:
    run_program(
        main,
        name="tost prepare tokenizer",
        doc=__doc__ or "",
        positional="[CONFIG]",
        config=DataPrepConfig,
    )
