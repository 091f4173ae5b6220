"""Score of a text file read as one stream, and rejected files."""

import math
from pathlib import Path

import pytest
import torch

from tost_lm.config import validate
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.eval.commands.evaluate import layout
from tost_lm.inference.long_text import score_text
from tost_lm.inference.settings import RanksConfig
from tost_lm.inference.text_file import BLOCK_BYTES, TextFile
from tost_lm.model.streaming import TILE_TOKENS
from tost_lm.tasks.registry import find_tasks
from tost_lm.testing import FLOAT32_REORDERED

TEXT = "Page 1. The lines of this page are short, née 漢字 🙂.\n\n  They say little! " * 30
UNLIMITED = {"positions": "none", "tssa": {"denom_bias": "head"}}


@pytest.fixture
def text(tmp_path: Path) -> TextFile:
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    return TextFile.check(tmp_path / "text.txt", "text.file")


@pytest.fixture
def model(make_model, tokenizer: Tokenizer):
    return make_model("TA", vocab_size=tokenizer.vocab_size, softmax={"window": 7}, **UNLIMITED)


@torch.inference_mode()
def test_the_score_of_a_stream_is_that_of_the_whole_text(text: TextFile, model, tokenizer: Tokenizer, monkeypatch):
    monkeypatch.setattr("tost_lm.inference.text_file.BLOCK_BYTES", 100)
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(TEXT)]])
    nats = model(ids[:, :-1], labels=ids[:, 1:]).nats.double().sum().item()
    scores, state = score_text(model, tokenizer, text)
    tokens, size = ids.shape[1] - 1, len(TEXT.encode())
    assert scores["nats"] == pytest.approx(nats, rel=FLOAT32_REORDERED)
    assert (scores["tokens"], scores["bytes"], state.positions) == (tokens, size, (tokens,))
    assert scores["nats_per_token"] == scores["nats"] / tokens
    assert scores["perplexity_per_token"] == pytest.approx(math.exp(scores["nats"] / tokens))
    assert scores["bits_per_byte"] == pytest.approx(scores["nats"] / math.log(2) / size)


def test_a_text_longer_than_the_positions_is_rejected(tmp_path: Path, make_model, tokenizer: Tokenizer):
    (tmp_path / "text.txt").write_text("They say little! " * 2500)
    text = TextFile.check(tmp_path / "text.txt", "text.file")
    length = len(tokenizer.encode("They say little! " * 2500))
    assert length > 2 * TILE_TOKENS
    for limit in (16, TILE_TOKENS + 9, length - 1):
        model = make_model(vocab_size=tokenizer.vocab_size, max_positions=limit)
        with pytest.raises(ConfigError, match=rf"tokens are more than .* = {limit}\); shorten the text"):
            score_text(model, tokenizer, text)
    model = make_model(vocab_size=tokenizer.vocab_size, max_positions=length)
    assert score_text(model, tokenizer, text)[0]["tokens"] == length


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", r"text\.file .*text\.txt: empty; give a text"),
        (b"caf\xe9 au lait", r"not UTF-8 \(byte 0xe9 at offset 3\)"),
        (b"a" * (BLOCK_BYTES - 1) + b"\xc3" + b"b", rf"not UTF-8 \(byte 0xc3 at offset {BLOCK_BYTES - 1:,}\)"),
        ("cut off: é".encode()[:-1], r"not UTF-8 \(byte 0xc3 at offset 9\)"),
    ],
)
def test_a_file_that_is_not_text_is_rejected(tmp_path: Path, data: bytes, problem: str):
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=problem) as rejected:
        TextFile.check(path, "text.file")
    assert "\n" not in str(rejected.value)


def test_a_text_that_changes_while_it_is_read_is_rejected(text: TextFile):
    assert "".join(text.blocks()) == TEXT
    text.path.write_text(TEXT.replace("1", "2"))
    with pytest.raises(DataError, match="changed while it was read"):
        list(text.blocks())


@pytest.mark.parametrize("characters", [1, 7, 10_000])
def test_the_end_of_a_text(text: TextFile, characters: int):
    assert text.end(characters) == TEXT[-characters:]


def test_ranks_beside_tensor_ranks_are_sequence_ranks_unless_they_are_set():
    def chosen(ranks: int, *tasks: str, **parallel: int) -> tuple[int, int]:
        config = layout(validate(RanksConfig, parallel, "test"), find_tasks(tasks or ("text",)), ranks)
        return config.tensor, config.sequence

    assert chosen(1) == (1, 1)
    assert chosen(4) == (1, 4)
    assert chosen(4, tensor=2) == (2, 2)
    assert chosen(4, sequence=2) == (1, 2)  # two copies of the model
    assert chosen(4, "text", "positions") == (1, 1)  # four copies, which share the sequences of positions
