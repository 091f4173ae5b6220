"""A small corpus, its shards, tiny models, and a file system in memory."""

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from builds import built
from small_runs import make_model, run_folder, shards, tokenizer

__all__ = ["built", "make_model", "run_folder", "shards", "tokenizer"]


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)
