"""Micro-batches of packed documents on a GPU, where each wait is an error."""

import pytest
import torch

from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM
from tost_lm.training.tiled import tiled_loss

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

T, VOCAB = 512, 64


@pytest.mark.parametrize("tile_tokens", [None, 200])
def test_packed_documents_wait_for_nothing(tile_tokens: int | None):
    shape = {"layers": 3, "heads": 4, "width": 64, "vocab_size": VOCAB, "max_positions": T}
    model = TostLM(validate(ModelConfig, {"pattern": "TSA", "window": 40, **shape}, "test")).cuda()
    tokens = torch.randint(VOCAB, (1, T), device="cuda")

    def step(*ends: int) -> None:
        cu_seqlens = torch.tensor([0, *ends, T], dtype=torch.int32)
        if tile_tokens is None:
            loss = model(tokens, tokens, cu_seqlens=cu_seqlens, label_count=1.0, output_state=False).loss
        else:
            loss = tiled_loss(model, tokens, tokens, tile_tokens, cu_seqlens)
        loss.backward()

    step(3, 100, 301)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(7, 33, 250, 402)
    finally:
        torch.cuda.set_sync_debug_mode("default")
