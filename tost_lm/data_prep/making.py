"""Making shards on the command line: reuse what is there, refuse to replace other shards, or build, with a report."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from tost_lm.data.settings import CorpusConfig, DataPrepConfig, ShardsConfig
from tost_lm.data.shard_format import SPLITS, counted_tokens, read_manifest
from tost_lm.data.shards import Shards
from tost_lm.data.sources import Document, left_out_files, parse, read_blocks, token_files
from tost_lm.data.tokenizers import Tokenizer, fastest, make_tokenizer
from tost_lm.data_prep.build import BuildProgress, build_shards, building_folder, identity, recover_folder
from tost_lm.data_prep.partitions import open_partitions, with_partition
from tost_lm.errors import DataError
from tost_lm.progress import ProgressBar


def make_shards(config: DataPrepConfig, partitions: Callable[[], Sequence[Shards]] = list) -> None:
    """Build the shards of `config`, or link those of `partitions`, and print what was done.

    Raises:
        DataError: the folder has shards of other settings, or as `build_shards`.
    """
    tokenizer = make_tokenizer(config)
    folder = config.shards.folder
    recover_folder(folder)
    if left_out := left_out_files(config.corpus.source):
        print(left_out)
    changed = difference(config, tokenizer)
    if changed and not config.shards.rebuild:
        raise DataError(
            f"shards.folder {folder}: has other shards: {changed}; give another folder, or set shards.rebuild=true to "
            "replace them, which runs that used them refuse"
        )
    reason = changed or build_reason(folder)
    if reason is None:
        print(f"reusing {folder}: same settings, corpus and tokenizer, all hashes match")
        return
    print(f"building {folder}: {reason}", flush=True)
    start = time.monotonic()
    finished = partitions()
    if not finished and not token_files(config.corpus.source):
        tokenizer, chosen = fastest(tokenizer, sample_texts(config.corpus))
        if chosen:
            print(chosen, flush=True)
    with ProgressBar("tokenizing", "B") as bar:

        def report(now: BuildProgress) -> None:
            total = round(now.bytes / now.fraction_read) if now.fraction_read else None
            bar(now.bytes, total, f"{now.documents:,} documents, {now.tokens:,} tokens")

        manifest = build_shards(config, tokenizer, report, finished)
    for split in SPLITS:
        entry = manifest["splits"][split]
        if entry["documents"]:
            size = entry["bytes"]
            text = "" if size is None else f", {size:,} bytes, {size / entry['tokens']:.3f} bytes per token"
            if (counted := counted_tokens(entry)) < entry["tokens"]:
                text = f", {counted:,} ({counted / entry['tokens']:.1%}) of them count in the loss{text}"
            print(f"{split}: {entry['documents']:,} documents, {entry['tokens']:,} tokens{text}")
    rows = manifest["rows"]
    if rows["bad"] or rows["left_out"]:
        print(f"{rows['read']:,} rows read, {rows['left_out']:,} left out by length, {rows['bad']:,} unreadable")
    print(f"{folder}: {time.monotonic() - start:.1f} s")


SAMPLES, SAMPLE_BYTES = 8, 32_768


def sample_texts(corpus: CorpusConfig) -> Iterator[str]:
    """The beginnings of texts from up to SAMPLES files across a corpus, of about SAMPLE_BYTES each.

    Raises:
        DataError: as `read_blocks`.
    """
    for number in range(SAMPLES):
        for block in islice(read_blocks(corpus, block_bytes=SAMPLE_BYTES, partition=(number, SAMPLES)), 1):
            yield from (row.text[:SAMPLE_BYTES] for row in parse(block, corpus) if isinstance(row, Document))


def checked_partitions(config: DataPrepConfig) -> list[Shards]:
    """The shards of all partitions, in order, after a full check.

    Raises:
        DataError: as `open_partitions` and `Shards.verify`, or one has other settings.
    """
    found, tokenizer = open_partitions(config), make_tokenizer(config)
    for number, shards in enumerate(found):
        if problem := difference(with_partition(config, (number, len(found))), tokenizer):
            raise DataError(
                f"{shards.folder}: {problem}; build it again with tost prepare shards "
                f"shards.partition={number}/{len(found)} shards.rebuild=true"
            )
        shards.verify()
    return found


def difference(config: DataPrepConfig, tokenizer: Tokenizer) -> str | None:
    """How the shards on disk differ from those of `config`; None: not at all, or there are none."""
    try:
        found = read_manifest(config.shards.folder)
    except DataError:
        return None
    wanted = identity(config, tokenizer)
    for name, value in wanted["settings"].items():
        if found["settings"].get(name) != value:
            section = "shards" if name in ShardsConfig.model_fields else "corpus"
            return f"{section}.{name} was {found['settings'].get(name)}"
    if found["tokenizer"] != wanted["tokenizer"]:
        return "the tokenizer changed"
    if found["source_fingerprint"] != wanted["source_fingerprint"]:
        same = found["source"] == config.corpus.source
        return f"the documents of {config.corpus.source} changed" if same else f"corpus.source was {found['source']}"
    if found["tool_version"] != wanted["tool_version"]:
        return f"built by version {found['tool_version']}"
    return None


def build_reason(folder: Path) -> str | None:
    """Why shards must be built where none are different; None if they are there and valid."""
    if not folder.exists():
        return "an earlier build was interrupted" if building_folder(folder).exists() else "it does not exist yet"
    try:
        Shards.open(folder).verify()
    except DataError as error:
        return str(error).partition(";")[0]
    return None
