"""Writing one split's shards with Megatron's own writer, so that its tools read them too."""

import warnings
from pathlib import Path
from typing import Any

from tost_lm.data.shard_format import dtype_for
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.files import sha256_file


class SplitWriter:
    """Writes the shards of one split, each closed by the document that fills it."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, shard_tokens: int) -> None:
        """Raises DataError where megatron-core is not installed."""
        self._builder_class = _megatron_builder_class()
        self._folder = folder
        self._split = split
        self._eot = tokenizer.eot
        self._dtype = dtype_for(tokenizer.vocab_size)
        self._shard_tokens = shard_tokens
        self._shards: list[dict[str, Any]] = []
        self._builder: Any = None

    def add(self, ids: list[int], text_bytes: int) -> None:
        """Append one document; `text_bytes` is its text's size in UTF-8."""
        import numpy as np

        if self._builder is None:
            name = f"{self._split}_{len(self._shards):05d}"
            self._builder = self._builder_class(str(self._folder / f"{name}.bin"), dtype=np.dtype(self._dtype).type)
            self._shards.append({"name": name, "documents": 0, "tokens": 0, "bytes": 0})
        self._builder.add_document(np.array([*ids, self._eot], dtype=self._dtype), [len(ids) + 1])
        shard = self._shards[-1]
        shard["documents"] += 1
        shard["tokens"] += len(ids) + 1
        shard["bytes"] += text_bytes
        if shard["tokens"] >= self._shard_tokens:
            self._close_shard()

    def total(self, what: str) -> int:
        """Sum of `documents`, `tokens` or `bytes` over the shards so far."""
        return sum(shard[what] for shard in self._shards)

    def finish(self) -> dict[str, Any]:
        """Close the last shard and return the split's manifest entry."""
        self._close_shard()
        return {what: self.total(what) for what in ("documents", "tokens", "bytes")} | {"shards": self._shards}

    def _close_shard(self) -> None:
        if self._builder is None:
            return
        shard = self._shards[-1]
        paths = {ending: self._folder / f"{shard['name']}.{ending}" for ending in ("bin", "idx")}
        self._builder.finalize(str(paths["idx"]))
        self._builder = None
        shard.update({f"{ending}_sha256": sha256_file(path) for ending, path in paths.items()})


def _megatron_builder_class() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron names every optional library it does not find
        try:
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
        except ImportError:
            raise DataError("writing shards needs megatron-core: pip install 'tost-lm[train]'") from None
    return IndexedDatasetBuilder
