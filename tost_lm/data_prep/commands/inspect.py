"""Inspect a shard folder: verify every hash, then print sizes, lengths, context and documents.

    tost prepare inspect data/embedded/shards inspect.split=valid inspect.documents=2

Exits with 2 and names the damaged file. Writes nothing.
"""

import time
from itertools import islice
from pathlib import Path
from typing import NoReturn, get_args

import numpy as np

from tost_lm.command_line import run_program
from tost_lm.data.loader import context_shares, context_sizes
from tost_lm.data.settings import InspectConfig, InspectShardsConfig
from tost_lm.data.shard_format import SPLITS, counted_tokens
from tost_lm.data.shards import Shards, length_histogram
from tost_lm.data.stages import Packing
from tost_lm.errors import printable

BAR = 40


def main(folder: Path, config: InspectShardsConfig) -> None:
    shards = Shards.open(folder)
    manifest = shards.manifest
    print(f"{folder}: corpus {manifest['source']}, tool version {manifest['tool_version']}, {manifest['dtype']} tokens")
    if config.inspect.verify:
        started = time.monotonic()
        shards.verify()
        print(f"every hash matches ({time.monotonic() - started:.1f} s)")
    rows = manifest["rows"]
    print(f"{rows['read']:,} rows read, {rows['left_out']:,} left out by length, {rows['bad']:,} unreadable")
    for row in shards.bad_rows()[:3]:
        print(f"  {row['where']}: {row['reason']}")
    print(f"\n{'split':>5} {'shards':>7} {'documents':>13} {'tokens':>16} {'bytes':>16}  bytes per token")
    for split in SPLITS:
        entry = manifest["splits"][split]
        size = "-" if entry["bytes"] is None else f"{entry['bytes']:,}"
        ratio = f"{entry['bytes'] / entry['tokens']:.3f}" if entry["bytes"] else "-"
        print(
            f"{split:>5} {len(entry['shards']):>7,} {entry['documents']:>13,} {entry['tokens']:>16,} "
            f"{size:>16}  {ratio}"
        )
    for split in SPLITS:
        if (counted := counted_tokens(entry := manifest["splits"][split])) < entry["tokens"]:
            print(f"{split}: {counted:,} of {entry['tokens']:,} tokens count in the loss")
    documents = manifest["splits"][config.inspect.split]["documents"]
    if documents > config.inspect.first:
        show_split(shards, config.inspect)
    else:
        print(f"\n{config.inspect.split}: {documents:,} documents, none from number {config.inspect.first:,}")


def show_split(shards: Shards, config: InspectConfig) -> None:
    split, tokenizer = config.split, shards.tokenizer()
    lengths = np.concatenate(shards.lengths(split))
    print(
        f"\nlength of {split} documents in tokens: mean {lengths.mean():,.1f}, median {np.median(lengths):,.0f}, "
        f"longest {lengths.max():,}"
    )
    buckets = length_histogram(lengths)
    most = max(documents for _, _, documents in buckets)
    for shortest, longest, documents in buckets:
        print(f"{shortest:>12,} to {longest:>12,} {documents:>12,} {'█' * round(BAR * documents / most)}")

    sizes = context_sizes(config.seq_len)
    print(f"\nlabels that see at least so many tokens of their own document, with inspect.seq_len {config.seq_len:,}:")
    packings: tuple[Packing, ...] = get_args(Packing)
    print(f"{'tokens':>12} {' '.join(f'{packing:>12}' for packing in packings)}")
    shares = [context_shares([lengths], config.seq_len, packing, sizes) for packing in packings]
    for size, *of_packings in zip(sizes, *shares, strict=True):
        print(f"{size:>12,} {' '.join(f'{share:>12.1%}' for share in of_packings)}")

    def show(tokens: np.ndarray, title: str) -> None:
        text = tokenizer.decode(tokens.tolist())
        more = " …" if len(text) > config.characters else ""
        print(f"\n── {title}: {len(tokens):,} tokens, {len(text):,} characters")
        print(printable(text[: config.characters], keep="\n\t") + more)

    documents = zip(shards.documents(split, config.first), shards.document_masks(split, config.first), strict=True)
    for number, (tokens, mask) in enumerate(islice(documents, config.documents), start=config.first):
        show(tokens, f"{split} document {number:,}")
        if not mask.all():
            show(tokens[mask[: len(tokens)] > 0], "counted in the loss")


def run() -> NoReturn:
    run_program(
        main,
        name="tost prepare inspect",
        doc=__doc__ or "",
        positional="FOLDER",
        takes_urls=True,
        config=InspectShardsConfig,
    )
