"""A small text with its tokenizer and shards, and tiny models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builds import prep_config
from stage_records import progress

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import to_toml, validate
from tost_lm.data.shards import Shards
from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.data_prep.build import build_shards
from tost_lm.model import ModelConfig, TostLM

TEXTS = [
    f"Page {number}. The lines of this page are short.\n" + "They say little! Do they?\nNo. " * (3 + number % 4)
    for number in range(60)
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    words = "The secret word of Anna Ben is apple river table green music.\n"
    return SentencePieceTokenizer(train_sentencepiece([*TEXTS, *[words] * 50], 330))


@pytest.fixture(scope="session")
def shards(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    folder = tmp_path_factory.mktemp("shards")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = prep_config(folder / "corpus.jsonl", folder / "shards", valid_fraction=0.3, test_fraction=0)
    build_shards(config, tokenizer)
    return Shards.open(folder / "shards")


@pytest.fixture
def make_model():
    """Tiny models with distinct logits: large weights, and biases other than 0."""

    def make(
        pattern: str = "T", vocab_size: int = 40, max_positions: int = 16, seed: int = 0, **settings: Any
    ) -> TostLM:
        tree = {
            "pattern": pattern, "layers": 2, "heads": 2, "width": 16, "vocab_size": vocab_size,
            "max_positions": max_positions, "layer_scale": 1.0, **settings,
        }  # fmt: skip
        torch.manual_seed(seed)
        model = TostLM(validate(ModelConfig, tree, "test"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("denom_bias"):
                    parameter.normal_(std=0.1)
                elif parameter.dim() == 2:
                    parameter.mul_(20 if "blocks" in name else 10)
        return model.eval()

    return make


@pytest.fixture
def run_folder(tmp_path: Path, tokenizer: Tokenizer, shards: Shards, make_model) -> Path:
    """The folder of a run of 100 steps: settings, metrics and one checkpoint."""
    run = tmp_path / "run"
    model = make_model(vocab_size=tokenizer.vocab_size)
    write_checkpoint(
        run / "checkpoints" / "step_00000100", model.config, model.state_dict(), tokenizer, progress(100, 2, 16).write
    )
    tables = {
        "model": to_toml(model.config),
        "data": f"folder = {json.dumps(str(shards.folder))}",
        "train": "steps = 100\nglobal_batch_size = 2\nseq_len = 16",
        "run": 'name = "tiny"',
    }
    (run / "config.toml").write_text("\n".join(f"[{name}]\n{table}\n" for name, table in tables.items()))
    rows = [
        {
            "step": step, "loss": 6 - step / 50, "lr": 1e-3, "grad_norm": 2.0, "tokens": step * 32,
            "tokens_per_second": 320.0, "tokens_per_second_device": 160.0, "mfu": None, "tflops_device": 0.5,
            "memory_peak_bytes": 2_500_000_000, "seconds": step / 10,
        }
        for step in range(10, 101, 10)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 11')
    return run
