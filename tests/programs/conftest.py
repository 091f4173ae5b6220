"""A tiny corpus, tokenizer and shards, made once by the programs."""

from pathlib import Path

import pytest
from made_once import made_once
from programs import TINY_RUN, write_tiny_run


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus.jsonl, data.toml, run.toml and out/shards; tests read it and write elsewhere."""
    return made_once(tmp_path_factory, "prepared", write_tiny_run)


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path) -> Path:
    """A fresh folder to run training in, with the prepared shards and settings."""
    (tmp_path / "out").symlink_to(prepared / "out")
    (tmp_path / "run.toml").write_text(TINY_RUN)
    return tmp_path
