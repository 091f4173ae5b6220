"""Token shards: building a folder of them, and reading one with NumPy alone."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tost_lm.data.config import DataPrepConfig
from tost_lm.data.shard_format import MANIFEST, SPLITS, TOKENIZER, Manifest, dtype_for, index_bytes, read_lengths
from tost_lm.data.shard_writer import SplitWriter
from tost_lm.data.sources import Document, documents, fingerprint, is_heldout
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.files import folder_aside, publish_folder, sha256_bytes, sha256_file
from tost_lm.version import VERSION

if TYPE_CHECKING:
    import numpy as np

FORMAT = "tost_lm.shards.v1"
BATCH_CHARACTERS = 1 << 20  # enough for every core to have documents to encode
OWN_FILE = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(TOKENIZER)}|({'|'.join(SPLITS)})_\d+\.(bin|idx)")
AGAIN = "build the shards again with python -m data_prep.build_shards"


def build_shards(
    config: DataPrepConfig, tokenizer: Tokenizer, progress: Callable[[int, int, int], None]
) -> dict[str, Any]:
    """Tokenize a corpus into `config.shards.folder`, replacing shards that are there, and return the manifest.

    A document is one sequence, its tokens and the end-of-text id. The folder appears whole or not at all. `progress`
    is called with the documents, bytes of text and tokens done so far: with zeros when reading begins, then after
    every batch of documents.

    Raises:
        DataError: the corpus cannot be read, a split would be empty, or the folder cannot be written or replaced.
    """
    folder = config.shards.folder
    _check_replaceable(folder)
    source_fingerprint = fingerprint(config.corpus)
    try:
        aside = folder_aside(folder)
        try:
            manifest = {
                "format": FORMAT,
                "tool_version": VERSION,
                "source": config.corpus.source,
                "source_fingerprint": source_fingerprint,
                "heldout_share": config.corpus.heldout_share,
                "shard_tokens": config.shards.shard_tokens,
                "tokenizer": {
                    "sha256": tokenizer.sha256,
                    "vocab_size": tokenizer.vocab_size,
                    "eot": tokenizer.eot,
                },
                "dtype": dtype_for(tokenizer.vocab_size),
                "splits": _write_splits(aside, config, tokenizer, progress),
            }
            (aside / TOKENIZER).write_bytes(tokenizer.model_bytes)
            (aside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        except (DataError, OSError):
            shutil.rmtree(aside, ignore_errors=True)
            raise
        publish_folder(aside, folder)
    except OSError as error:
        raise DataError(f"shards.folder {folder}: cannot be written: {error}") from None
    return manifest


class Shards:
    """An opened shard folder. `manifest` is the content of its manifest.json, `fingerprint` that file's hex SHA-256."""

    def __init__(self, folder: Path, manifest: dict[str, Any], fingerprint: str) -> None:
        self.folder = folder
        self.manifest = manifest
        self.fingerprint = fingerprint
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.eot: int = manifest["tokenizer"]["eot"]

    @classmethod
    def open(cls, folder: Path) -> "Shards":
        """Open a folder after checking its manifest, the files' sizes and the tokenizer's hash.

        Raises:
            DataError: it is no shard folder, of an unknown format, incomplete, or has another tokenizer.
        """
        import numpy as np

        try:
            data = (folder / MANIFEST).read_bytes()
        except OSError:
            raise DataError(f"{folder}: not a shard folder; python -m data_prep.build_shards makes one") from None
        try:
            manifest = Manifest.model_validate_json(data)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(map(str, problem["loc"])) or "JSON"
            raise DataError(
                f"{folder / MANIFEST}: damaged or not {FORMAT} ({where}: {problem['msg']}); {AGAIN}"
            ) from None
        itemsize = np.dtype(manifest.dtype).itemsize
        for entry in (*manifest.splits.train.shards, *manifest.splits.valid.shards):
            _check_size(folder / f"{entry.name}.bin", entry.tokens * itemsize)
            _check_size(folder / f"{entry.name}.idx", index_bytes(entry.documents))
        _check_tokenizer(folder / TOKENIZER, manifest.tokenizer.sha256)
        return cls(folder, manifest.model_dump(), sha256_bytes(data))

    def verify(self) -> None:
        """Read every file and compare its hash. Raises DataError naming the first that differs."""
        for split in SPLITS:
            for entry in self._entries(split):
                for ending in ("bin", "idx"):
                    path = self.folder / f"{entry['name']}.{ending}"
                    if sha256_file(path) != entry[f"{ending}_sha256"]:
                        raise DataError(f"{path}: damaged, its SHA-256 is not the manifest's; {AGAIN}")
        _check_tokenizer(self.folder / TOKENIZER, self.manifest["tokenizer"]["sha256"])

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made these tokens."""
        return Tokenizer.from_file(self.folder / TOKENIZER)

    def token_arrays(self, split: str) -> "list[np.memmap]":
        """Each shard's tokens as one mapped array [tokens] of the manifest's dtype, read-only."""
        import numpy as np

        paths = [self.folder / f"{entry['name']}.bin" for entry in self._entries(split)]
        return [np.memmap(path, dtype=self.manifest["dtype"], mode="r") for path in paths]

    def documents(self, split: str) -> "Iterator[np.ndarray]":
        """The tokens [n] of each document in order, without the end-of-text id. Raises DataError for a damaged .idx."""
        import numpy as np

        for entry, tokens in zip(self._entries(split), self.token_arrays(split), strict=True):
            path = self.folder / f"{entry['name']}.idx"
            lengths = read_lengths(path, self.manifest["dtype"], entry["documents"], entry["tokens"])
            for end, length in zip(np.cumsum(lengths, dtype=np.int64), lengths, strict=True):
                yield tokens[end - length : end - 1]

    def _entries(self, split: str) -> list[dict[str, Any]]:
        return self.manifest["splits"][split]["shards"]


def _write_splits(
    folder: Path, config: DataPrepConfig, tokenizer: Tokenizer, progress: Callable[[int, int, int], None]
) -> dict[str, Any]:
    writers = {split: SplitWriter(folder, split, tokenizer, config.shards.shard_tokens) for split in SPLITS}
    progress(0, 0, 0)
    for batch in _batches(documents(config.corpus)):
        encoded = tokenizer.encode_batch([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            split = "valid" if is_heldout(document.name, config.corpus.heldout_share) else "train"
            writers[split].add(ids, len(document.text.encode()))
        totals = [sum(writer.total(what) for writer in writers.values()) for what in ("documents", "bytes", "tokens")]
        progress(*totals)
    splits = {split: writer.finish() for split, writer in writers.items()}
    for split, change in (("train", "lower"), ("valid", "raise")):
        if not splits[split]["documents"]:
            raise DataError(
                f"corpus.heldout_share {config.corpus.heldout_share}: leaves no document in the {split} split; "
                f"{change} it, or add documents"
            )
    return splits


def _batches(stream: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in stream:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_replaceable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"shards.folder {folder}: is a file; choose another folder")
    foreign = [path.name for path in folder.iterdir() if not OWN_FILE.fullmatch(path.name)] if folder.exists() else []
    if foreign:
        raise DataError(
            f"shards.folder {folder}: holds other files ({foreign[0]}), and a build replaces it; choose another folder"
        )


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise DataError(f"{path}: missing; {AGAIN}")
    if path.stat().st_size != size:
        raise DataError(f"{path}: damaged, {path.stat().st_size} bytes where the manifest says {size}; {AGAIN}")


def _check_tokenizer(path: Path, sha256: str) -> None:
    if not path.is_file():
        raise DataError(f"{path}: missing; {AGAIN}")
    if sha256_file(path) != sha256:
        raise DataError(f"{path}: wrong tokenizer for the shards, its SHA-256 is not the manifest's; {AGAIN}")
