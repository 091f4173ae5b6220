"""Texts and tokenizer files beside the checkout, which some tests read. They are not part of the project."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tost_lm.data.tokenizers import HfTokenizer

SHARED = Path(__file__).parents[2] / "shared/data"
GPT2_BPE = SHARED / "gpt2_bpe"
"""encoder.json and vocab.bpe of GPT-2."""
MISSING = "../shared/data is not beside the checkout"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=MISSING)


def skip_without_shared() -> None:
    """The same in a fixture."""
    if not SHARED.is_dir():
        pytest.skip(MISSING)


def write_gpt2(folder: Path) -> Path:
    """Write GPT-2's tokenizer as the Hugging Face hub has it, and return the folder."""
    from transformers import GPT2Tokenizer

    GPT2Tokenizer(vocab=str(GPT2_BPE / "encoder.json"), merges=str(GPT2_BPE / "vocab.bpe")).save_pretrained(folder)
    return folder


@cache
def gpt2_tokenizer() -> "HfTokenizer":
    """GPT-2's tokenizer."""
    from tost_lm.data.tokenizers.hf import hf_tokenizer

    with TemporaryDirectory() as folder:
        return hf_tokenizer(write_gpt2(Path(folder)) / "tokenizer.json", "<|endoftext|>", "none")
