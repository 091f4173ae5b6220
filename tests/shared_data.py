"""Texts and tokenizer files beside the checkout, which some tests read. They are not part of the project."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared/data"
GPT2_BPE = SHARED / "gpt2_bpe"
"""encoder.json and vocab.bpe of GPT-2."""
MISSING = "../shared/data is not beside the checkout"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=MISSING)


def skip_without_shared() -> None:
    """The same in a fixture."""
    if not SHARED.is_dir():
        pytest.skip(MISSING)
