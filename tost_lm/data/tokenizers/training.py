"""Training a SentencePiece BPE tokenizer on a uniform sample of the training documents of a corpus.

A record of its settings and corpus decides whether a trained tokenizer can be reused.
"""

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import xxhash

from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.sources import BadRow, Splitter, count_rows, parse, read_blocks
from tost_lm.data.sources.blocks import too_many_bad
from tost_lm.data.tokenizers.interface import escape
from tost_lm.errors import DataError
from tost_lm.files import regular_file, sha256_bytes, sha256_file, write_atomically
from tost_lm.version import VERSION

SAMPLE_SEED = 2**63  # differs from the seed of the split's hash for every tokenizer.seed


class Sample(NamedTuple):
    """`texts` in UTF-8, in random order; the numbers of training `documents` and skipped `bad_rows` of the corpus."""

    texts: list[bytes]
    documents: int
    bad_rows: int


def sample_texts(config: DataPrepConfig, report: Callable[[int, int | None], None]) -> Sample:
    """Read a corpus and keep at most `tokenizer.sample_bytes` of the text of its training documents.

    The selection and its order depend on the texts and the seed, not on the order of the corpus. `report` is called
    with the bytes of training text read so far and the estimated total, or None if it is unknown.

    Raises:
        DataError: the corpus cannot be read, has more bad rows than allowed, or has no training document.
    """
    corpus = config.corpus
    splitter = Splitter(corpus, count_rows(corpus) if corpus.split == "nanogpt" else None)
    chosen = _Smallest(config.tokenizer.sample_bytes)
    documents = text_bytes = rows = bad_rows = 0
    first_bad: BadRow | None = None
    for block in read_blocks(corpus):
        for row in parse(block, corpus):
            if isinstance(row, BadRow):
                bad_rows += 1
                first_bad = first_bad or row
            elif splitter.split_of(row.row, row.text) == "train":
                text = row.text.encode()
                chosen.add(xxhash.xxh3_64_intdigest(text, SAMPLE_SEED + config.tokenizer.seed), text)
                documents += 1
                text_bytes += len(text)
        rows = block.end.row
        report(text_bytes, round(text_bytes / block.fraction_read) if block.fraction_read else None)
    if first_bad and bad_rows > corpus.max_bad_fraction * rows:
        raise too_many_bad(first_bad.where, first_bad.reason, bad_rows, rows)
    if not documents:
        raise DataError(
            f"corpus.source {corpus.source}: no training document; add documents or lower corpus.valid_fraction"
        )
    return Sample(chosen.texts(), documents, bad_rows)


class _Smallest:
    """Keeps the texts with the smallest priorities that fit in `most` bytes; the last text is cut."""

    def __init__(self, most: int) -> None:
        self._room = most
        self._kept: list[tuple[int, bytes]] = []  # a heap of (-priority, text); the first is dropped next
        self._dropped: tuple[int, bytes] | None = None  # the smallest that did not fit; larger ones are dropped too

    def add(self, priority: int, text: bytes) -> None:
        entry = (-priority, text)
        if self._dropped is not None and entry <= self._dropped:
            return
        heappush(self._kept, entry)
        self._room -= len(text)
        while self._room < 0:
            self._dropped = heappop(self._kept)
            self._room += len(self._dropped[1])

    def texts(self) -> list[bytes]:
        texts = [text for _, text in sorted(self._kept, reverse=True)]
        if self._dropped is not None:
            texts.append(self._dropped[1][: self._room].decode(errors="ignore").encode())
        return texts


TRAINER = Path(__file__).parents[1] / "sentencepiece_process.py"
TEXT_CHARACTERS = 4000  # documents exceed SentencePiece's limits; single lines would hide newlines from merges


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a BPE model of exactly `vocab_size` pieces on `texts` and return its bytes. Deterministic.

    SentencePiece runs in a separate process that ends with this call, because nothing else interrupts it.

    Raises:
        DataError: the texts do not allow this vocabulary size; the message has the possible size.
    """
    command = [sys.executable, "-P", str(TRAINER), str(vocab_size)]
    done = subprocess.run(command, input=pickle.dumps([*_short(texts)]), capture_output=True)
    if done.returncode < 0:
        raise DataError(
            f"SentencePiece's training failed with exit code {done.returncode} (-9: out of memory; lower "
            "tokenizer.sample_bytes)"
        )
    if done.returncode:
        raise DataError(_explain(done.stderr.decode(), vocab_size))
    return done.stdout


def _short(texts: Iterable[str]) -> Iterator[str]:
    """The texts, escaped and cut."""
    for text in map(escape, texts):
        yield from (text[start : start + TEXT_CHARACTERS] for start in range(0, len(text), TEXT_CHARACTERS))


def _explain(problem: str, vocab_size: int) -> str:
    if most := re.search(r"value <= (\d+)", problem):
        return f"tokenizer.vocab_size {vocab_size}: too large for this training text; set at most {most[1]} or add text"
    if least := re.search(r"required_chars\. \d+ vs (\d+)", problem):
        return f"tokenizer.vocab_size {vocab_size}: too small for the characters of this text; set at least {least[1]}"
    if "sentences_.empty()" in problem or "all_chars_count" in problem:
        return "no training text; add text or lower corpus.valid_fraction"
    return f"SentencePiece's training failed: {problem.splitlines()[-1]}"


def record_path(config: DataPrepConfig) -> Path:
    """Path of the record: the model's name and `.json`."""
    return config.tokenizer.path.with_name(config.tokenizer.path.name + ".json")


def write_tokenizer(config: DataPrepConfig, fingerprint: str, model: bytes, documents: int, text_bytes: int) -> None:
    """Write the model and its record. `documents` and `text_bytes` (UTF-8) are the size of the training sample."""
    record = {
        "tool_version": VERSION,
        "source": config.corpus.source,
        **_determinants(config, fingerprint),
        "documents": documents,
        "bytes": text_bytes,
        "sha256": sha256_bytes(model),
    }
    try:
        write_atomically(record_path(config), json.dumps(record, indent=2) + "\n")  # first: a model without it is kept
        write_atomically(config.tokenizer.path, model)
    except OSError as error:
        raise DataError(f"tokenizer.path {config.tokenizer.path}: cannot be written: {error.strerror}") from None


def retrain_reason(config: DataPrepConfig, fingerprint: str) -> str | None:
    """Why the tokenizer on disk differs from the one of `config`, in a few words; None if it does not. Raises DataError
    if it was not trained here."""
    path = config.tokenizer.path
    if not path.is_file():
        return "it does not exist yet"
    try:
        record = dict(json.loads(regular_file(record_path(config)).read_bytes()))
        actual = sha256_file(path)
    except FileNotFoundError:
        raise DataError(f"tokenizer.path {path}: was trained elsewhere; choose another, or set no vocab_size") from None
    except (OSError, TypeError, ValueError):
        return f"{record_path(config)} or the model cannot be read"
    for name, wanted in _determinants(config, fingerprint).items():
        if record.get(name) != wanted:
            changed = name == "source_fingerprint"
            return "the corpus or its settings changed" if changed else f"{name} was {record.get(name)}"
    return None if record.get("sha256") == actual else "the model file differs from its record"


def _determinants(config: DataPrepConfig, fingerprint: str) -> dict[str, object]:
    """Everything that determines the model, by the names of the settings."""
    tokenizer, corpus = config.tokenizer, config.corpus
    return {
        "vocab_size": tokenizer.vocab_size,
        "sample_bytes": tokenizer.sample_bytes,
        "seed": tokenizer.seed,
        "split": corpus.split,
        **(
            {"valid_fraction": corpus.valid_fraction, "test_fraction": corpus.test_fraction}
            if corpus.split == "hash"
            else {}
        ),
        "source_fingerprint": fingerprint,
    }
