"""Train the lossless SentencePiece tokenizer on a corpus' training documents, or reuse the one that is already there.

    python -m data_prep.train_tokenizer configs/data/embedded.toml
    python -m data_prep.train_tokenizer configs/data/embedded.toml tokenizer.vocab_size=8192 \\
        tokenizer.user_symbols='["<|fim|>"]'

Writes tokenizer.path and beside it a record of what it was trained on.
"""

import time
from pathlib import Path

from data_prep.progress import Progress
from tost_lm.config import run_program
from tost_lm.data.config import DataPrepConfig
from tost_lm.data.sources import fingerprint
from tost_lm.data.sources.messages import changed
from tost_lm.data.tokenizers import SentencePieceTokenizer
from tost_lm.data.tokenizers.record import model_path, why_stale, write_tokenizer
from tost_lm.data.tokenizers.sample import sample_texts
from tost_lm.data.tokenizers.training import symbol_pieces, train_sentencepiece
from tost_lm.errors import ConfigError, DataError

CHECKED_BYTES = 8_000_000  # a few seconds, forth and back


def main(_: Path | None, config: DataPrepConfig) -> None:
    """Train, check that the training text comes back, write."""
    if config.tokenizer.kind == "gpt2":
        print("tokenizer.kind gpt2: nothing to train; python -m data_prep.build_shards makes shards with it")
        return
    path, vocab_size = model_path(config), config.tokenizer.vocab_size
    if vocab_size is None:
        raise ConfigError("tokenizer.vocab_size: must be set to train a tokenizer")
    symbols = symbol_pieces(config.tokenizer.user_symbols)
    corpus_fingerprint = fingerprint(config.corpus)
    reason = why_stale(config, corpus_fingerprint)
    if reason is None:
        print(f"reusing {path}: same settings and corpus")
        return
    print(f"training {path}: {reason}", flush=True)
    start = time.monotonic()
    with Progress("reading", "B") as progress:
        sample = sample_texts(config, progress)
    if fingerprint(config.corpus) != corpus_fingerprint:
        raise changed(config.corpus)
    with Progress("training", " pieces") as progress:
        texts = (text.decode() for text in sample.texts)
        tokenizer = SentencePieceTokenizer(train_sentencepiece(texts, vocab_size, symbols, progress))
    bytes_per_token = check_lossless(tokenizer, sample.texts)
    sample_bytes = sum(map(len, sample.texts))
    write_tokenizer(config, corpus_fingerprint, tokenizer.model_bytes, len(sample.texts), sample_bytes)
    print(
        f"{path}: {tokenizer.vocab_size} pieces from {len(sample.texts):,} of {sample.documents:,} training documents, "
        f"{sample_bytes:,} bytes; {bytes_per_token:.3f} bytes per token of them; {time.monotonic() - start:.1f} s"
    )
    if sample.bad_rows:
        print(f"{sample.bad_rows:,} unreadable rows left out")


def check_lossless(tokenizer: SentencePieceTokenizer, texts: list[bytes]) -> float:
    """Bytes per token over the first of `texts`. Raises DataError if one does not come back exactly."""
    checked = tokens = 0
    for text in texts:
        ids = tokenizer.encode(text.decode())
        if tokenizer.decode(ids).encode() != text:
            raise DataError(
                f"the trained tokenizer loses text: a document of {len(text)} bytes does not come back from its "
                "tokens; nothing was written; try other tokenizer.user_symbols"
            )
        tokens += len(ids)
        checked += len(text)
        if checked >= CHECKED_BYTES:
            break
    return checked / tokens


if __name__ == "__main__":
    run_program(main, name="data_prep.train_tokenizer", doc=__doc__ or "", takes="[CONFIG]", config=DataPrepConfig)
