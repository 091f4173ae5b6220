"""A small corpus with awkward texts, and settings to build it with."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.config import validate
from tost_lm.data import build
from tost_lm.data.config import DataPrepConfig
from tost_lm.data.sources import read_blocks
from tost_lm.data.tokenizers import Tokenizer

TEXTS = [f"document {number}:\u2581" + " naïve \r\n😀\0" * (number % 7) + "word " * number for number in range(80)]


class Built(NamedTuple):
    config: DataPrepConfig
    tokenizer: Tokenizer
    manifest: dict[str, Any]


def prep_config(corpus: Path, shards: Path, workers: int = 1, shard_tokens: int = 900, **more: Any) -> DataPrepConfig:
    """Settings of a build; `more` are settings of [corpus]."""
    tree = {
        "corpus": {"source": str(corpus), "valid_share": 0.2, "test_share": 0.1, **more},
        "tokenizer": {"path": "unused", "vocab_size": 300},
        "shards": {"folder": str(shards), "shard_tokens": shard_tokens, "workers": workers},
    }
    return validate(DataPrepConfig, tree, "test")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def build_in_small_steps(config: DataPrepConfig, tokenizer: Tokenizer) -> None:
    """For a process of its own: a build with small blocks that commits after each."""
    build.read_blocks = partial(read_blocks, block_bytes=1000)
    build.COMMIT_SECONDS = 0.0
    build.build_shards(config, tokenizer)
