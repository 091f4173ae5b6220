"""Memory of exact tiles with a softmax layer without a window: keys, values, their gradients and states of tiles."""

import pytest
import torch

from benchmarks.measure import run_cell
from tost_lm.config import validate
from tost_lm.mixers.state import SharedState
from tost_lm.model import ModelConfig, TostLM

MODEL = {"pattern": "DDDA", "layers": 4, "heads": 4, "width": 256, "vocab_size": 512, "positions": "none"}
SHORT, LONG, TILE = 8192, 65536, 2048


@torch.no_grad()
def bytes_of_other_states(config: ModelConfig) -> int:
    """The states of the layers whose state has a constant size."""
    state = TostLM(config)(torch.zeros(1, 64, dtype=torch.int64), output_state="last").state
    assert state is not None
    layers = [layer for layer in state.layers if not isinstance(layer, SharedState)]
    return sum(x.untyped_storage().nbytes() for layer in layers for x in layer)


@pytest.mark.timeout(3000)
def test_memory_grows_by_keys_and_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))  # freed memory is returned at once
    config = validate(ModelConfig, MODEL, "test")
    cell, call = "benchmarks.long:one_step", {"device": "cpu", "limit_s": 1400, "model": MODEL}
    peaks = [run_cell(cell, **call, tokens=tokens, tile_tokens=TILE)["peak_bytes"] for tokens in (SHORT, LONG)]
    keys_values_and_gradients = 2 * 2 * 4 * config.width * (LONG - SHORT)
    states = bytes_of_other_states(config) * (LONG - SHORT) // TILE
    grown = peaks[1] - peaks[0]
    print(f"{grown / 1e6:.0f} MB more: {grown / keys_values_and_gradients:.3f} of keys, values and their gradients")
    assert grown <= 1.1 * keys_values_and_gradients + states
