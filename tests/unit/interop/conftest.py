"""A tiny model and its tokenizer, as a model folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import validate
from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.model import ModelConfig, TostLM

TEXTS = [
    f"Page {number}. The lines of this page are short.\n" + "They say little! Do they?\nNo. " * (3 + number % 4)
    for number in range(60)
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return SentencePieceTokenizer(train_sentencepiece(TEXTS, 330))


@pytest.fixture
def make_export(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., Path]:
    """Writes tiny models with large weights, so that their logits differ clearly."""

    def make(tokenizer: Tokenizer = tokenizer, **settings: Any) -> Path:
        tree = {
            "pattern": "TA", "layers": 2, "heads": 2, "width": 16, "vocab_size": tokenizer.vocab_size + 3,
            "max_positions": 16, "layer_scale": 1.0, **settings,
        }  # fmt: skip
        torch.manual_seed(0)
        model = TostLM(validate(ModelConfig, tree, "test"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2:
                    parameter.mul_(40 if "blocks" in name else 10)
        write_checkpoint(tmp_path / "export", model.config, model.state_dict(), tokenizer)
        return tmp_path / "export"

    return make
