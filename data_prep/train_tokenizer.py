"""python -m data_prep.train_tokenizer configs/data/embedded.toml

Train the lossless SentencePiece tokenizer on a corpus' training documents, or reuse the one that is already there.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from tost_lm.config import run_program
from tost_lm.data.config import DataPrepConfig
from tost_lm.data.sources import documents, fingerprint, is_heldout
from tost_lm.data.tokenizer_record import why_stale, write_tokenizer
from tost_lm.data.tokenizers import Tokenizer, train_tokenizer

CHECKED_BYTES = 32_000_000  # decoding this much back takes seconds


class TrainingTexts:
    """The texts to train on; counts what was read and keeps the first ones for the check."""

    def __init__(self, config: DataPrepConfig) -> None:
        self._config = config
        self.documents = 0
        self.bytes = 0
        self.kept: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for document in documents(self._config.corpus):
            if is_heldout(document.name, self._config.corpus.heldout_share):
                continue
            self.documents += 1
            self.bytes += len(document.text.encode())
            if self.bytes <= CHECKED_BYTES or not self.kept:
                self.kept.append(document.text)
            yield document.text
            if self.bytes >= self._config.tokenizer.max_training_bytes:
                return


def main(_: Path, config: DataPrepConfig) -> None:
    """Train, check that the training text comes back, write."""
    path = config.tokenizer.path
    corpus_fingerprint = fingerprint(config.corpus)
    reason = why_stale(config, corpus_fingerprint)
    if reason is None:
        print(f"reusing {path}: same settings and corpus")
        return
    print(f"training {path}: {reason}", flush=True)
    start = time.monotonic()
    texts = TrainingTexts(config)
    tokenizer = Tokenizer(train_tokenizer(texts, config.tokenizer.vocab_size))
    bytes_per_token = check_lossless(tokenizer, texts.kept)
    write_tokenizer(config, corpus_fingerprint, tokenizer.model_bytes, texts.documents, texts.bytes)
    print(
        f"{path}: {tokenizer.vocab_size} pieces from {texts.documents} documents, {texts.bytes} bytes; "
        f"{bytes_per_token:.3f} bytes per token of training text; {time.monotonic() - start:.1f} s"
    )


def check_lossless(tokenizer: Tokenizer, texts: list[str]) -> float:
    """Bytes per token over `texts`. Raises AssertionError if a text does not come back exactly."""
    tokens = 0
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text, f"a text of {len(text)} characters does not come back from its tokens"
        tokens += len(ids)
    return sum(len(text.encode()) for text in texts) / tokens


if __name__ == "__main__":
    run_program(main, name="data_prep.train_tokenizer", doc=__doc__ or "", takes="CONFIG", config=DataPrepConfig)
