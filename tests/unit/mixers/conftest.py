"""Short chunks for the backends of CPUs."""

import pytest

from tost_lm.mixers.tssa import chunked


@pytest.fixture
def chunks_of_32_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunked, "CPU_CHUNK_ELEMENTS", 1)
