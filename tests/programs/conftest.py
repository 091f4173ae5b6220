"""A tiny corpus, tokenizer and shards, made once by the programs."""

from pathlib import Path

import pytest
from made_once import made_once
from programs import linked, write_tiny_run


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus.jsonl, data.toml, run.toml and out/shards; tests read it and write elsewhere."""
    return made_once(tmp_path_factory, "prepared", write_tiny_run)


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path) -> Path:
    """A fresh folder to run training in, with the prepared shards and settings."""
    return linked(prepared, tmp_path)
