"""Token files that Megatron wrote, used in place: links to them become the shards of a folder."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from tost_lm.data.settings import CorpusConfig, DataPrepConfig
from tost_lm.data.shard_format import ITEM_BYTES, LOSS_MASK, SPLITS, block_hashes, parse_index
from tost_lm.data.sources import token_files
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import regular_file


def link_tokens(config: DataPrepConfig, folder: Path) -> dict[str, Any]:
    """Link the token files of `corpus.source` in `folder`. Each file is divided on its own, as Megatron's --split does:
    first the training documents, then those for validation, then those for testing.

    Returns what the manifest records of them.

    Raises:
        ConfigError: a setting that needs text.
        DataError: an .idx file is damaged or of another format, a .bin has another size, or types of tokens differ.
    """
    corpus = config.corpus
    if of_text := sorted(corpus.model_fields_set - {"source", "valid_fraction", "test_fraction"}):
        raise ConfigError(f"corpus.{of_text[0]}: {corpus.source} has tokens and no text; remove the setting")
    files = token_files(corpus.source)
    shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    dtypes, empty = [], 0
    for index_file, bin_file in zip(files[::2], files[1::2], strict=True):
        data = regular_file(index_file.path).read_bytes()
        index = parse_index(index_file.path, data)
        dtypes.append(index.dtype)
        empty += index.empty
        if index.dtype != dtypes[0]:
            raise DataError(
                f"{index_file.path}: tokens are {index.dtype}, those of {files[0].path} {dtypes[0]}; give each its own "
                "folder, and mix them with data.mixture"
            )
        if index_file.path.with_suffix(f".{LOSS_MASK}").exists():
            raise DataError(f"{index_file.path}: its loss mask cannot be linked; add its folder to data.mixture")
        item, total = ITEM_BYTES[index.dtype], int(index.lengths.sum(dtype="int64"))
        if bin_file.size != total * item:
            raise DataError(
                f"{bin_file.path}: damaged, {bin_file.size} bytes instead of {total * item}; copy the file again"
            )
        first_token = 0
        for split, (first, end) in zip(SPLITS, pairwise(_bounds(corpus, len(index.lengths))), strict=True):
            tokens = int(index.lengths[first:end].sum(dtype="int64"))
            if not tokens:
                continue
            name = f"{split}_{len(shards[split]):05d}"
            for file in (index_file.path, bin_file.path):
                (folder / f"{name}{file.suffix}").symlink_to(file.absolute())
            hashes = block_hashes(bin_file.path, first_token * item, (first_token + tokens) * item)
            linked = {
                "first_document": first,
                "first_token": first_token,
                "bin_bytes": bin_file.size,
                "idx_bytes": len(data),
            }
            shards[split].append({
                "name": name, "documents": end - first, "tokens": tokens, "bytes": None,
                "idx_xxh3": xxhash.xxh3_128_hexdigest(data),
                "bin_xxh3": list(hashes),
                "linked": linked,
            })  # fmt: skip
            first_token += tokens
    splits = {
        split: {what: sum(shard[what] for shard in of_split) for what in ("documents", "tokens")}
        | {"bytes": None, "shards": of_split}
        for split, of_split in shards.items()
    }
    documents = sum(entry["documents"] for entry in splits.values())
    rows = {"read": documents + empty, "bad": 0, "left_out": empty}
    return {"dtype": dtypes[0], "rows": rows, "splits": splits}


def _bounds(corpus: CorpusConfig, documents: int) -> list[int]:
    """The first document of each split, and the number of documents."""
    held_out = (corpus.valid_fraction + corpus.test_fraction, corpus.test_fraction, 0.0)
    return [0, *(round(documents * (1 - fraction)) for fraction in held_out)]
