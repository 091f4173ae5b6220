"""Tokenize a corpus into shards, on all cores; a command that was stopped goes on where it was.

    python -m data_prep.build_shards configs/data/embedded.toml
    python -m data_prep.build_shards corpus.source='books/*.jsonl.gz' shards.folder=data/books/shards \\
        tokenizer.kind=gpt2 tokenizer.path=gpt2_bpe

Writes shards.folder: Megatron's .bin and .idx files, the tokenizer and manifest.json. Shards of the same corpus,
settings and tokenizer that are already there are verified and reused. A SentencePiece tokenizer is trained first, by
data_prep.train_tokenizer; without tokenizer.vocab_size the model in tokenizer.path is taken as it is.
"""

import time
from pathlib import Path

from data_prep.progress import Progress
from tost_lm.config import run_program
from tost_lm.data.build import SoFar, build_shards, building_folder, identity, settle
from tost_lm.data.config import DataPrepConfig
from tost_lm.data.shard_format import SPLITS
from tost_lm.data.shards import Shards
from tost_lm.data.tokenizers import Tokenizer, make_tokenizer
from tost_lm.errors import DataError


class Report:
    """Shows the state of a build on a bar, and at first where it goes on."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._first: SoFar | None = None
        self._started = time.monotonic()

    def __call__(self, now: SoFar) -> None:
        if self._first is None:
            self._first, self._started = now, time.monotonic()
            if now.documents:
                print(f"going on after {now.documents:,} documents, {now.tokens:,} tokens", flush=True)
        rate = (now.tokens - self._first.tokens) / max(time.monotonic() - self._started, 1e-3)
        total = round(now.bytes / now.share_read) if now.share_read else None
        self._bar(now.bytes, total, f"{rate:,.0f} tokens/s, {now.documents:,} documents")


def main(_: Path | None, config: DataPrepConfig) -> None:
    """Reuse or build."""
    tokenizer = make_tokenizer(config)
    folder = config.shards.folder
    settle(folder)
    reason = why_rebuild(config, tokenizer)
    if reason is None:
        print(f"reusing {folder}: same settings, corpus and tokenizer, all hashes match")
        return
    print(f"building {folder}: {reason}", flush=True)
    start = time.monotonic()
    with Progress("tokenizing", "B") as bar:
        manifest = build_shards(config, tokenizer, Report(bar))
    for split in SPLITS:
        entry = manifest["splits"][split]
        if entry["documents"]:
            print(
                f"{split}: {entry['documents']:,} documents, {entry['tokens']:,} tokens, {entry['bytes']:,} bytes, "
                f"{entry['bytes'] / entry['tokens']:.3f} bytes per token"
            )
    rows = manifest["rows"]
    if rows["bad"] or rows["left_out"]:
        print(f"of {rows['read']:,} rows {rows['left_out']:,} left out by length, {rows['bad']:,} unreadable")
    print(f"{folder}: {time.monotonic() - start:.1f} s")


def why_rebuild(config: DataPrepConfig, tokenizer: Tokenizer) -> str | None:
    """Why the shards on disk are not the ones that `config` asks for; None when they are."""
    folder = config.shards.folder
    if not folder.exists():
        return "an earlier build was stopped" if building_folder(folder).exists() else "there are none yet"
    try:
        shards = Shards.open(folder)
        found, wanted = shards.manifest, identity(config, tokenizer)
        if found["source_fingerprint"] != wanted["source_fingerprint"]:
            return "the corpus or what is taken of it changed"
        if found["tokenizer"] != wanted["tokenizer"]:
            return "the tokenizer changed"
        for name, value in wanted["settings"].items():
            if found["settings"].get(name) != value:
                return f"{name} was {found['settings'].get(name)}"
        if found["tool_version"] != wanted["tool_version"]:
            return f"they were built by version {found['tool_version']}"
        shards.verify()
    except DataError as error:
        return str(error).partition(";")[0]
    return None


if __name__ == "__main__":
    run_program(main, name="data_prep.build_shards", doc=__doc__ or "", takes="[CONFIG]", config=DataPrepConfig)
