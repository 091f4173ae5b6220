"""Memory of `experiments.analysis` with 16,384 and 131,072 tokens a sequence: it processes tiles, not whole ones."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import CHECKOUT, ENVIRONMENT

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import validate
from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.data_prep.build import build_shards
from tost_lm.model import ModelConfig, TostLM

SHAPE = {"layers": 4, "heads": 6, "width": 192, "positions": "none", "tssa": {"denom_bias": "head"}, "layer_scale": 0.5}


def write_text(folder: Path) -> Tokenizer:
    """Shards with more than 300,000 held-out tokens."""
    draws = random.Random(0)
    words = ["".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=draws.randrange(2, 9))) for _ in range(400)]
    texts = [" ".join(draws.choices(words, k=2000)) + ".\n" for _ in range(400)]
    tokenizer = SentencePieceTokenizer(train_sentencepiece(texts[:20], 600))
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tree = {
        "corpus": {"source": str(folder / "corpus.jsonl"), "valid_fraction": 0.5},
        "tokenizer": {"path": "unused", "vocab_size": 600},
        "shards": {"folder": str(folder / "shards"), "workers": 1},
    }
    build_shards(validate(DataPrepConfig, tree, "test"), tokenizer)
    return tokenizer


def peak_mb(*words: object) -> float:
    """Peak memory of a Python process in MB."""
    process = subprocess.Popen([sys.executable, *map(str, words)], cwd=CHECKOUT, env=ENVIRONMENT)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0
    return used.ru_maxrss / 1000


@pytest.mark.timeout(3600)
def test_memory_grows_by_less_than_one_activation_per_position(pytestconfig: pytest.Config, tmp_path: Path):
    if not pytestconfig.getoption("--full"):
        pytest.skip("minutes: pytest --full")
    tokenizer = write_text(tmp_path)
    peaks = {}
    for tokens in (16384, 131072):
        torch.manual_seed(0)
        config = validate(ModelConfig, {**SHAPE, "vocab_size": tokenizer.vocab_size, "max_positions": tokens}, "test")
        write_checkpoint(tmp_path / str(tokens), config, TostLM(config).state_dict(), tokenizer)
        settings = [f"heldout.shards={tmp_path / 'shards'}", "memberships.sequences=2"]
        peaks[tokens] = peak_mb("-m", "experiments.analysis", tmp_path / str(tokens), *settings)
        assert (tmp_path / str(tokens) / "eval/tssa_layers@1/results.json").is_file()
    print(peaks)
    # One activation of the model's width takes 768 bytes per position, one of its MLP 3,072.
    assert (peaks[131072] - peaks[16384]) * 1e6 / (131072 - 16384) < 700
