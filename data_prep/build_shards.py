"""python -m data_prep.build_shards configs/data/embedded.toml

Tokenize a corpus into shards with the tokenizer that data_prep.train_tokenizer made, or reuse shards already there.
"""

import sys
import time
from pathlib import Path

from tost_lm.config import run_program
from tost_lm.data.config import DataPrepConfig
from tost_lm.data.shard_format import SPLITS
from tost_lm.data.shards import Shards, build_shards
from tost_lm.data.sources import fingerprint
from tost_lm.data.tokenizer_record import why_stale
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError

LINE_SECONDS = 10.0  # between lines of progress in a log
REWRITE_SECONDS = 0.5  # between rewrites of the line on a terminal


class Progress:
    """Writes documents, MB/s and tokens/s to stderr from time to time."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._start = self._written = 0.0

    def __call__(self, documents: int, text_bytes: int, tokens: int) -> None:
        now = time.monotonic()
        if not documents:
            self._start = self._written = now
        if now - self._written < (REWRITE_SECONDS if self._terminal else LINE_SECONDS):
            return
        self._written = now
        seconds = now - self._start
        line = f"{documents} documents, {text_bytes / 1e6 / seconds:.2f} MB/s, {tokens / seconds:.0f} tokens/s"
        sys.stderr.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        sys.stderr.flush()


def main(path: Path, config: DataPrepConfig) -> None:
    """Check the tokenizer, then reuse or build."""
    corpus_fingerprint = fingerprint(config.corpus)
    if reason := why_stale(config, corpus_fingerprint):
        raise DataError(
            f"tokenizer.path {config.tokenizer.path}: not the tokenizer of this configuration ({reason}); "
            f"run python -m data_prep.train_tokenizer {path} first"
        )
    tokenizer = Tokenizer.from_file(config.tokenizer.path)
    folder = config.shards.folder
    reason = why_rebuild(config, corpus_fingerprint, tokenizer)
    if reason is None:
        print(f"reusing {folder}: same settings, corpus and tokenizer, all hashes match")
        return
    print(f"building {folder}: {reason}", flush=True)
    start = time.monotonic()
    manifest = build_shards(config, tokenizer, Progress())
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    for split in SPLITS:
        entry = manifest["splits"][split]
        print(
            f"{split}: {entry['documents']} documents, {entry['tokens']} tokens, {entry['bytes']} bytes, "
            f"{entry['bytes'] / entry['tokens']:.3f} bytes per token"
        )
    print(f"{folder}: {time.monotonic() - start:.1f} s")


def why_rebuild(config: DataPrepConfig, corpus_fingerprint: str, tokenizer: Tokenizer) -> str | None:
    """Why the shards on disk are not the ones that `config` asks for; None when they are."""
    if not config.shards.folder.exists():
        return "there are none yet"
    try:
        shards = Shards.open(config.shards.folder)
        found = shards.manifest
        if found["source_fingerprint"] != corpus_fingerprint:
            return "the corpus changed"
        if found["tokenizer"]["sha256"] != tokenizer.sha256:
            return "the tokenizer changed"
        wanted = {"heldout_share": config.corpus.heldout_share, "shard_tokens": config.shards.shard_tokens}
        for name, value in wanted.items():
            if found[name] != value:
                return f"{name} was {found[name]}"
        shards.verify()
    except DataError as error:
        return str(error).partition(";")[0]
    return None


if __name__ == "__main__":
    run_program(main, name="data_prep.build_shards", doc=__doc__ or "", takes="CONFIG", config=DataPrepConfig)
