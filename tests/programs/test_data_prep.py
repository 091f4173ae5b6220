"""The data_prep programs: outputs, partitions, other shards, and one-line errors."""

import gzip
import json
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from programs import refusal, refusal_here, run, run_here, snapshot, write_corpus
from shared_data import needs_shared, write_gpt2

from tost_lm.data.shard_format import SPLITS
from tost_lm.data.shards import Shards


@pytest.fixture
def config(tmp_path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl", documents=60, words=300)
    path = tmp_path / "small.toml"
    path.write_text(
        f'[corpus]\nsource = "{tmp_path}/corpus.jsonl"\nvalid_fraction = 0.1\n'
        f'[tokenizer]\npath = "{tmp_path}/out/tokenizer.model"\nvocab_size = 400\nsample_bytes = 100_000\n'
        f'[shards]\nfolder = "{tmp_path}/out/shards"\n'
    )
    return path


def test_partitions_of_killed_processes_and_a_slurm_array_are_merged(config, tmp_path):
    write_corpus(tmp_path / "corpus.jsonl", documents=1500, words=300)
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "corpus").mkdir()
    for number, (first, end) in enumerate(pairwise([0, 100, 600, 700, 1500])):
        (tmp_path / f"corpus/{number}.jsonl").write_text("".join(lines[first:end]))
    words = (config, f"corpus.source={tmp_path}/corpus", "shards.shard_tokens=50000")
    run("tost prepare tokenizer", *words, cwd=tmp_path)
    run("tost prepare shards", *words, f"shards.folder={tmp_path}/whole", cwd=tmp_path)

    parts = tmp_path / "out/shards.partitions"
    array: dict[str, Any] = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "3"}
    while not (parts / ".2-of-3.building/journal.json").exists():  # again, if it finished before it was killed
        shutil.rmtree(parts / "2-of-3", ignore_errors=True)
        killed = Forked("tost prepare shards", *words, "shards.partition=2/3", cwd=tmp_path)
        while not (parts / ".2-of-3.building/journal.json").exists() and killed.is_running():
            time.sleep(0.01)
        killed.finish(0.0)
    tasks = [
        Forked("tost prepare shards", *words, cwd=tmp_path, SLURM_ARRAY_TASK_ID=str(task), **array) for task in (1, 2)
    ]
    assert [task.finish()[0] for task in tasks] == [0, 0]
    assert "partitions are missing: 2/3; build" in refusal("tost prepare merge", *words, cwd=tmp_path)
    resumed = run("tost prepare shards", *words, cwd=tmp_path, SLURM_ARRAY_TASK_ID="3", **array)
    assert "resuming after " in resumed
    changed = ("tokenizer.vocab_size=none", "corpus.min_characters=9")
    other = refusal("tost prepare merge", *words, *changed, cwd=tmp_path)
    assert "0-of-3: corpus.min_characters was 1; build it again with tost prepare shards" in other
    file, whole = parts / "2-of-3/train_00000.bin", (parts / "2-of-3/train_00000.bin").read_bytes()
    file.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    assert f"{file}: damaged between bytes" in refusal("tost prepare merge", *words, cwd=tmp_path)
    file.write_bytes(whole)
    run("tost prepare merge", *words, cwd=tmp_path)
    merged, at_once = (Shards.open(tmp_path / name) for name in ("out/shards", "whole"))
    for split in SPLITS:
        assert [*merged.texts(split)] == [*at_once.texts(split)]
    assert run("tost prepare merge", *words, cwd=tmp_path).startswith("reusing ")


def test_other_shards_are_only_replaced_on_request(config, tmp_path):
    shards = tmp_path / "out/shards"

    def replaced(problem: str, *words: str) -> None:
        before = snapshot(tmp_path / "out")
        assert refusal("tost prepare shards", config, *words, cwd=tmp_path) == (
            f"shards.folder {shards}: has other shards: {problem}; give another folder, or set shards.rebuild=true to "
            "replace them, which runs that used them refuse"
        )
        assert snapshot(tmp_path / "out") == before
        said = run("tost prepare shards", config, *words, "shards.rebuild=true", cwd=tmp_path)
        assert said.startswith(f"building {shards}: {problem}\n")
        assert run("tost prepare shards", config, *words, cwd=tmp_path).startswith(f"reusing {shards}: ")

    run("tost prepare tokenizer", config, cwd=tmp_path)
    assert ": it does not exist yet\n" in run("tost prepare shards", config, cwd=tmp_path)
    replaced("shards.shard_tokens was 100000000", "shards.shard_tokens=5000")
    smaller = ["tokenizer.vocab_size=350", "shards.shard_tokens=5000"]
    assert "vocab_size was 400; train" in refusal("tost prepare shards", config, *smaller, cwd=tmp_path)
    run("tost prepare tokenizer", config, *smaller, cwd=tmp_path)
    replaced("the tokenizer changed", *smaller)
    write_corpus(tmp_path / "corpus.jsonl", documents=70, words=300)
    assert refusal("tost prepare shards", config, *smaller, cwd=tmp_path) == (
        f"tokenizer.path {tmp_path}/out/tokenizer.model: the corpus or its settings changed; train the tokenizer with "
        "tost prepare tokenizer and the same settings, or leave tokenizer.vocab_size out to use the existing model "
        "as it is"
    )
    any_corpus = ["shards.shard_tokens=5000", "tokenizer.vocab_size=none"]
    replaced(f"the documents of {tmp_path}/corpus.jsonl changed", *any_corpus)
    write_corpus(tmp_path / "other.jsonl", documents=70, words=200)
    damaged = shards / "train_00000.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    replaced(f"corpus.source was {tmp_path}/corpus.jsonl", *any_corpus, "corpus.source=other.jsonl")


def test_another_corpus_with_the_same_tokenizer_from_overrides_alone(config, tmp_path):
    run("tost prepare tokenizer", config, cwd=tmp_path)
    folder = tmp_path / "rows"
    folder.mkdir()
    with gzip.open(folder / "a.json.gz", "wt") as file:
        file.writelines(json.dumps({"body": text}) + "\n" for text in ("one text", "", "another"))
    (folder / "b.txt").write_text("a third")
    flags = (f"corpus.source={folder}/*", "corpus.text_field=body", "corpus.valid_fraction=0", "shards.folder=more")
    output = run("tost prepare shards", *flags, f"tokenizer.path={tmp_path}/out/tokenizer.model", cwd=tmp_path)
    assert "train: 3 documents" in output
    assert "4 rows read, 1 left out by length, 0 unreadable" in output
    shown = run("tost prepare inspect", "more", "inspect.documents=2", "inspect.first=1", cwd=tmp_path)
    assert "every hash matches" in shown
    assert "own document, with inspect.seq_len 32,768:\n      tokens concatenated     best-fit\n" in shown
    assert "\n      16,384         0.0%         0.0%\n" in shown
    assert "train document 1: " in shown
    assert "\nanother\n" in shown
    assert "\na third" in shown
    assert "one text" not in shown
    unverified = run("tost prepare inspect", "more", "inspect.verify=false", "inspect.split=valid", cwd=tmp_path)
    assert "hash" not in unverified


@needs_shared
def test_gpt2_with_nanogpt_split(tmp_path):
    rows = [json.dumps({"text": f"Hello world {number}"}) for number in range(4000)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    (tmp_path / "gpt2.toml").write_text(
        '[corpus]\nsource = "corpus.jsonl"\nsplit = "nanogpt"\n[tokenizer]\npath = "tokenizer"\n'
        '[shards]\nfolder = "shards"\n'
    )
    write_gpt2(tmp_path / "tokenizer")
    assert "prepare shards, which uses" in refusal("tost prepare tokenizer", "gpt2.toml", cwd=tmp_path)
    run("tost prepare shards", "gpt2.toml", cwd=tmp_path)
    shards = Shards.open(tmp_path / "shards")
    assert (shards.vocab_size, shards.eot) == (50257, 50256)
    documents = list(shards.documents("valid"))
    assert len(documents) == 2
    assert [tokens[:2].tolist() for tokens in documents] == [[15496, 995]] * 2


def test_errors_are_one_line_and_change_no_output(config, tmp_path):
    run_here("tost prepare tokenizer", config, cwd=tmp_path)
    before = snapshot(tmp_path / "out")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    mistakes = {
        "corpus.source=nowhere": "nowhere: no such file or folder",
        f"corpus.source={tmp_path}/empty.jsonl": "empty.jsonl: no rows",
        f"corpus.source={tmp_path}/latin.txt": "latin.txt: byte 3 is not UTF-8 (convert the text",
        "tokenizer.vocab_sise=500": "tokenizer.vocab_sise: unknown key (did you mean tokenizer.vocab_size?)",
        "tokenizer.vocab_size=100000": "vocab_size 100000: too large for this training text; set at most",
        "tokenizer.path=/dev/null/tokenizer.model": "/dev/null/tokenizer.model: cannot be written",
        "tokenizer.path=s3://bucket/x": ": the model at s3://bucket/x is used as it is; set tokenizer.vocab_size=none",
    }
    for override, problem in mistakes.items():
        assert problem in refusal_here("tost prepare tokenizer", config, override, cwd=tmp_path)
    assert "small.tom: no such configuration file (did you mean" in refusal_here(
        "tost prepare shards", tmp_path / "small.tom", cwd=tmp_path
    )
    assert "shards.folder: URLs are not" in refusal_here(
        "tost prepare shards", config, "shards.folder=s3://x", cwd=tmp_path
    )
    assert not (tmp_path / "s3:").exists()
    assert "not a shard folder" in refusal_here("tost prepare inspect", tmp_path, cwd=tmp_path)
    (tmp_path / "web").mkdir()
    (tmp_path / "web/manifest.json").write_text("{}")
    (tmp_path / "web/index.html").write_text("years of work")
    for folder in (tmp_path, tmp_path / "web"):
        assert "other files" in refusal_here("tost prepare shards", config, f"shards.folder={folder}", cwd=tmp_path)
    assert (tmp_path / "web/index.html").read_text() == "years of work"
    assert snapshot(tmp_path / "out") == before
