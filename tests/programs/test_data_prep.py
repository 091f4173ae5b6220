"""data_prep/ as a user runs it: outputs, reuse, rebuilding, interruption, and one plain line for every mistake."""

import json
from pathlib import Path

import pytest
from programs import interrupt, refusal, run, snapshot, write_corpus

from data_prep.build_shards import why_rebuild
from tost_lm.config import load_config
from tost_lm.data.config import DataPrepConfig
from tost_lm.data.shards import Shards
from tost_lm.data.sources import fingerprint
from tost_lm.data.tokenizers import Tokenizer


@pytest.fixture
def config(tmp_path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl", documents=60, words=300)
    path = tmp_path / "small.toml"
    path.write_text(
        f'[corpus]\nsource = "{tmp_path}/corpus.jsonl"\nheldout_share = 0.1\n'
        f'[tokenizer]\npath = "{tmp_path}/out/tokenizer.model"\nvocab_size = 400\n'
        f'[shards]\nfolder = "{tmp_path}/out/shards"\n'
    )
    return path


def test_make_interrupt_reuse_and_rebuild(config, tmp_path):
    write_corpus(tmp_path / "corpus.jsonl", documents=1500, words=300)
    out = tmp_path / "out"
    model, shards = out / "tokenizer.model", out / "shards"

    assert "run python -m data_prep.train_tokenizer" in refusal("data_prep.build_shards", config, cwd=tmp_path)
    said = run("data_prep.train_tokenizer", config, cwd=tmp_path)
    assert f"training {model}: there is none yet" in said
    assert "400 pieces" in said
    record = json.loads((out / "tokenizer.model.json").read_text())
    assert record["vocab_size"] == 400

    code, errors = interrupt(
        "data_prep.build_shards", config, cwd=tmp_path, when=(out / ".shards.tmp/train_00000.bin").exists
    )
    assert code == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not shards.exists()
    said = run("data_prep.build_shards", config, cwd=tmp_path)
    assert f"building {shards}: there are none yet" in said
    assert "bytes per token" in said
    assert {path.name for path in out.iterdir()} == {"shards", "tokenizer.model", "tokenizer.model.json"}
    opened = Shards.open(shards)
    opened.verify()
    splits = opened.manifest["splits"]
    assert splits["train"]["documents"] == record["documents"] == 1500 - splits["valid"]["documents"]
    assert opened.tokenizer().sha256 == record["sha256"]

    before = snapshot(out)
    assert run("data_prep.train_tokenizer", config, cwd=tmp_path) == f"reusing {model}: same settings and corpus\n"
    assert run("data_prep.build_shards", config, cwd=tmp_path).startswith(f"reusing {shards}: ")
    assert snapshot(out) == before

    damaged = shards / "train_00000.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x07")
    assert f"building {shards}: {damaged}: damaged" in run("data_prep.build_shards", config, cwd=tmp_path)
    assert snapshot(out) == before

    settings = load_config(DataPrepConfig, config)
    source = fingerprint(settings.corpus)
    assert why_rebuild(settings, source, opened.tokenizer()) is None
    assert why_rebuild(settings, "another", opened.tokenizer()) == "the corpus changed"
    for override, reason in {
        "corpus.heldout_share=0.2": "heldout_share was 0.1",
        "shards.shard_tokens=50": "shard_tokens was 100000000",
    }.items():
        assert why_rebuild(load_config(DataPrepConfig, config, [override]), source, opened.tokenizer()) == reason

    smaller = "tokenizer.vocab_size=350"
    assert "vocab_size was 400" in refusal("data_prep.build_shards", config, smaller, cwd=tmp_path)
    assert f"training {model}: vocab_size was 400" in run("data_prep.train_tokenizer", config, smaller, cwd=tmp_path)
    assert why_rebuild(settings, source, Tokenizer.from_file(model)) == "the tokenizer changed"


def test_other_reasons_to_train_again(config, tmp_path):
    run("data_prep.train_tokenizer", config, cwd=tmp_path)
    model = tmp_path / "out/tokenizer.model"
    model.write_bytes(model.read_bytes()[:-1])
    assert "the model file is not the one in its record" in run("data_prep.train_tokenizer", config, cwd=tmp_path)
    (tmp_path / "out/tokenizer.model.json").write_text("[]")
    assert "is damaged" in run("data_prep.train_tokenizer", config, cwd=tmp_path)
    write_corpus(tmp_path / "corpus.jsonl", documents=70, words=300)
    assert "the corpus changed" in run("data_prep.train_tokenizer", config, cwd=tmp_path)
    assert "heldout_share was 0.1" in run("data_prep.train_tokenizer", config, "corpus.heldout_share=0.2", cwd=tmp_path)
    assert "from 30 documents" in run(
        "data_prep.train_tokenizer", config, "tokenizer.max_training_bytes=61000", cwd=tmp_path
    )


def test_mistakes_are_one_line_and_leave_the_output_alone(config, tmp_path):
    run("data_prep.train_tokenizer", config, cwd=tmp_path)
    before = snapshot(tmp_path / "out")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    mistakes = {
        "corpus.source=nowhere": "nowhere: no such file or folder",
        f"corpus.source={tmp_path}/empty.jsonl": "empty.jsonl: holds no text",
        f"corpus.source={tmp_path}/latin.txt": "latin.txt: byte 3 is not UTF-8",
        "corpus.source=hub:no/such": "hub:no/such: cannot be loaded",
        "tokenizer.vocab_sise=500": "tokenizer.vocab_sise: unknown key (did you mean tokenizer.vocab_size?)",
        "tokenizer.vocab_size=100000": "vocab_size 100000: too large, the training documents allow at most",
        "tokenizer.path=/dev/null/tokenizer.model": "/dev/null/tokenizer.model: cannot be written",
    }
    for override, problem in mistakes.items():
        assert problem in refusal("data_prep.train_tokenizer", config, override, cwd=tmp_path)
    assert "small.tom: no such configuration file (did you mean" in refusal(
        "data_prep.build_shards", tmp_path / "small.tom", cwd=tmp_path
    )
    (tmp_path / "web").mkdir()
    (tmp_path / "web/manifest.json").write_text("{}")
    (tmp_path / "web/index.html").write_text("years of work")
    for folder in (tmp_path, tmp_path / "web"):
        assert "holds other files" in refusal("data_prep.build_shards", config, f"shards.folder={folder}", cwd=tmp_path)
    assert (tmp_path / "web/index.html").read_text() == "years of work"
    assert snapshot(tmp_path / "out") == before
