"""A tiny model and its tokenizer, as a model folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.data.tokenizers import Tokenizer


@pytest.fixture
def make_export(tmp_path: Path, tokenizer: Tokenizer, make_model: Callable[..., Any]) -> Callable[..., Path]:
    """Writes tiny models, whose vocabulary is padded."""

    def make(tokenizer: Tokenizer = tokenizer, pattern: str = "TA", **settings: Any) -> Path:
        model = make_model(pattern, tokenizer.vocab_size + 3, **settings)
        write_checkpoint(tmp_path / "export", model.config, model.state_dict(), tokenizer)
        return tmp_path / "export"

    return make
