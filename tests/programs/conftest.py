"""A tiny corpus, tokenizer and shards, made once by the programs."""

from pathlib import Path

import pytest
from programs import run, write_corpus

TINY_RUN = """
[model]
layers = 2
heads = 2
width = 16
vocab_size = 384
max_positions = 64
layer_scale = 1.0
[data]
folder = "out/shards"
[optim]
lr = 1e-2
warmup_steps = 2
[train]
steps = 12
global_batch_size = 4
micro_batch_size = 1
seq_len = 64
[checkpoint]
interval = 4
[run]
name = "tiny"
log_every = 1
device = "cpu"
"""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus.jsonl, data.toml, run.toml and out/shards; tests read it and write elsewhere."""
    folder = tmp_path_factory.mktemp("prepared")
    write_corpus(folder / "corpus.jsonl", documents=80, words=300)
    (folder / "data.toml").write_text(
        '[corpus]\nsource = "corpus.jsonl"\nvalid_fraction = 0.1\n'
        '[tokenizer]\npath = "out/tokenizer.model"\nvocab_size = 384\n[shards]\nfolder = "out/shards"\n'
    )
    (folder / "run.toml").write_text(TINY_RUN)
    run("tost prepare tokenizer", "data.toml", cwd=folder)
    run("tost prepare shards", "data.toml", cwd=folder)
    return folder


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path) -> Path:
    """A fresh folder to run training in, with the prepared shards and settings."""
    (tmp_path / "out").symlink_to(prepared / "out")
    (tmp_path / "run.toml").write_text(TINY_RUN)
    return tmp_path
