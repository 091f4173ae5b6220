"""The benchmark of tokenizing and loading, small, as a user runs it."""

import json
from pathlib import Path

from programs import run
from shared_data import GPT2_BPE

SMALL = (
    "build.megabytes=1", "build.rounds=1", "build.workers=2", "build.vocab_size=300", "loader.index_tokens=1_000_000",
    "loader.tokens=500_000", "loader.seq_len=[64]", "loader.batch_tokens=8192", "loader.steps=3",
)  # fmt: skip


def test_every_contender_tokenizes_and_both_packings_are_loaded(tmp_path: Path):
    gpt2 = GPT2_BPE.is_dir()  # without it SentencePiece is measured alone
    (tmp_path / "corpus.txt").write_text("What every contender reads is this text, 3.14 times.\n" * 2000)
    words = ["build.source=corpus.txt", *([f"build.gpt2={GPT2_BPE}"] if gpt2 else [])]
    said = run("benchmarks.data", *SMALL, *words, cwd=tmp_path)
    (path,) = (tmp_path / "benchmarks/results").glob("data_*.json")
    cells = json.loads(path.read_text())["cells"]
    builds = [cell for cell in cells if cell["work"] == "build"]
    assert [cell["tokenizer"] for cell in builds] == [
        "SentencePiece",
        *(["GPT-2, tiktoken", "GPT-2, tokenizer.json"] if gpt2 else []),
    ]
    for cell in builds:
        assert [len(seconds) for seconds in cell["seconds"].values()] == [1, 1, 1]
        assert cell["bytes"] >= 1e6
    loads = [cell for cell in cells if cell["work"] == "loader"]
    assert [(cell["seq_len"], cell["packing"]) for cell in loads] == [(64, "concatenated"), (64, "best-fit")]
    assert all(len(cell["step_seconds"]) == 3 for cell in loads)
    table = [line for line in said.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(builds) + 2 + 2
    written = path.with_suffix(".md").read_text()
    assert all(line in written for line in table)
    assert not list(tmp_path.glob(".benchmark-*"))
