"""A text file in one stream: its score is that of the whole text, and files that are none are refused."""

import math
from pathlib import Path

import pytest
import torch

from tost_lm.config import validate
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.evaluation.config import GenerateConfig, ScoreTextConfig
from tost_lm.evaluation.text import BLOCK_BYTES, TextFile, score_text

TEXT = "Page 1. The lines of this page are short, née 漢字 🙂.\n\n  They say little! " * 30
UNLIMITED = {"positions": "sinusoidal", "denom_bias": "head"}


@pytest.fixture
def text(tmp_path: Path) -> TextFile:
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    return TextFile.check(tmp_path / "text.txt", "text.file")


@pytest.fixture
def model(make_model, tokenizer: Tokenizer):
    return make_model("TA", vocab_size=tokenizer.vocab_size, window=7, **UNLIMITED)


@torch.inference_mode()
def test_its_score_is_that_of_the_whole(text: TextFile, model, tokenizer: Tokenizer, monkeypatch):
    monkeypatch.setattr("tost_lm.evaluation.text.BLOCK_BYTES", 100)
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(TEXT)]])
    nats = model(ids[:, :-1], labels=ids[:, 1:]).nats.double().sum().item()
    scores, state = score_text(model, tokenizer, text)
    tokens, size = ids.shape[1] - 1, len(TEXT.encode())
    assert scores["nats"] == pytest.approx(nats, rel=1e-6)
    assert (scores["tokens"], scores["bytes"], state.positions) == (tokens, size, (tokens,))
    assert scores["nats_per_token"] == scores["nats"] / tokens
    assert scores["perplexity_per_token"] == pytest.approx(math.exp(scores["nats"] / tokens))
    assert scores["bits_per_byte"] == pytest.approx(scores["nats"] / math.log(2) / size)


def test_the_mean_so_far_is_told(text: TextFile, model, tokenizer: Tokenizer, monkeypatch, capsys):
    monkeypatch.setattr("tost_lm.evaluation.text.TELL_EVERY_S", 0)
    scores, _ = score_text(model, tokenizer, text)
    assert f"{scores['tokens']:,} tokens, {scores['nats_per_token']:.4f} nats/token so far" in capsys.readouterr().out


def test_a_text_beyond_the_positions_is_refused(text: TextFile, make_model, tokenizer: Tokenizer):
    with pytest.raises(ConfigError, match=r"more than the model has positions \(model\.max_positions = 16\)"):
        score_text(make_model(vocab_size=tokenizer.vocab_size), tokenizer, text)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", r"text\.file .*text\.txt: empty; give a text"),
        (b"caf\xe9 au lait", r"not UTF-8 \(byte 0xe9 at offset 3\)"),
        (b"a" * (BLOCK_BYTES - 1) + b"\xc3" + b"b", rf"not UTF-8 \(byte 0xc3 at offset {BLOCK_BYTES - 1:,}\)"),
        ("cut off: é".encode()[:-1], r"not UTF-8 \(byte 0xc3 at offset 9\)"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes, problem: str):
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=problem) as refused:
        TextFile.check(path, "text.file")
    assert "\n" not in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"text\.file .*nowhere: no such file"):
        TextFile.check(tmp_path / "nowhere", "text.file")
    with pytest.raises(DataError, match="not a file; it is read twice, so a pipe will not do"):
        TextFile.check(tmp_path, "text.file")


def test_a_text_that_changes_while_it_is_read_is_refused(text: TextFile):
    assert "".join(text.blocks()) == TEXT
    text.path.write_text(TEXT.replace("1", "2"))
    with pytest.raises(DataError, match="changed while it was read"):
        list(text.blocks())


@pytest.mark.parametrize("characters", [1, 7, 10_000])
def test_the_end_of_a_text(text: TextFile, characters: int):
    assert text.end(characters) == TEXT[-characters:]


def test_settings_that_miss_or_double_a_text_are_one_line():
    with pytest.raises(ConfigError, match=r"^test: text\.file: must be set$"):
        validate(ScoreTextConfig, {}, "test")
    with pytest.raises(ConfigError, match=r"^test: sample\.prompt_file stands in place of sample\.prompt: give one"):
        validate(GenerateConfig, {"sample": {"prompt": "a", "prompt_file": "b"}}, "test")
