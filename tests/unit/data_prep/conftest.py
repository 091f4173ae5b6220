from functools import partial

import pytest

from tost_lm.data.sources import read_blocks
from tost_lm.data_prep import build


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "read_blocks", partial(read_blocks, block_bytes=1000))  # about 20 blocks
    monkeypatch.setattr(build, "COMMIT_SECONDS", 0.0)
