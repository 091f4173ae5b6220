"""Short chunks for the backends of CPUs."""

from importlib.util import find_spec

import pytest

from tost_lm.mixers.tssa import chunked


@pytest.fixture
def chunks_of_32_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunked, "CPU_CHUNK_ELEMENTS", 1)
    if find_spec("numba"):
        monkeypatch.setattr("tost_lm.mixers.tssa.numba_phases.NUMBA_CHUNK_TOKENS", 32)
