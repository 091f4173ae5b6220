"""Decoding on a GPU: a captured graph chooses the tokens of ordinary calls, and waits for nothing."""

from typing import Any

import pytest
import torch

from tost_lm.config import validate
from tost_lm.inference.decoding import WARM_UP_STEPS, Decoder, decoder
from tost_lm.model import ModelConfig, TostLM
from tost_lm.testing import assert_close

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

TOKENS, VOCAB, PROMPT = 300, 64, 5
CASES = [{"pattern": "T"}, {"pattern": "TDDA", "softmax": {"window": 40}}, {"pattern": "A", "softmax": {"kv_heads": 2}}]


@pytest.mark.parametrize("settings", CASES, ids=str)
@torch.no_grad()
def test_a_graph_decodes_like_calls(settings: dict[str, Any]):
    """300 tokens in float64, beyond the first memory of keys: equal within rounding."""
    shape = {"layers": 4, "heads": 4, "width": 64, "vocab_size": VOCAB, "layer_scale": 1.0}
    torch.manual_seed(0)
    model = TostLM(validate(ModelConfig, {**shape, **settings}, "test")).to("cuda", torch.float64).eval()
    state = model(torch.randint(VOCAB, (2, PROMPT), device="cuda")).state
    decode, tokens_TB = decoder(model, state), torch.randint(VOCAB, (TOKENS, 2), device="cuda")
    assert isinstance(decode, Decoder)
    captured = []
    for t, token_B in enumerate(tokens_TB):
        output = model(token_B[:, None], state=state)
        state = output.state
        assert_close(decode(token_B), output.logits[:, -1], 1e-10, f"logits of token {t}")
        captured.append(decode._graph is not None)
    assert captured[WARM_UP_STEPS:].count(False) == (1 if settings["pattern"] == "A" else 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode(tokens_TB[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
