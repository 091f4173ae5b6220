"""The plan's FLOPs of recomputation beside those that torch counts in the real model."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tost_lm.config import validate
from tost_lm.model import TostLM
from tost_lm.model.transforms import apply_activation_checkpointing
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.plan.traffic import recomputed_flops

B, T = 6, 12


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(("layer_scale", "in_tiles"), [(1.0, False), (0.0, True)])
@pytest.mark.parametrize(
    ("seq_len", "tile_tokens", "model"),
    [
        (T, 4, {"pattern": "TD", "mlp": "swiglu"}),
        # The mean number of keys that a token sees is T, as many as torch counts.
        (2 * T - 1, 100, {"pattern": "TAA", "softmax": {"kv_heads": 1}}),
    ],
)
def test_recomputed_flops_are_what_torch_counts(
    seq_len: int, tile_tokens: int, model: dict[str, Any], layer_scale: float, in_tiles: bool, checkpointing: str
):
    memory: dict[str, Any] = {
        "activation_checkpointing": checkpointing,
        "mlp_tile_tokens": tile_tokens if in_tiles else 0,
    }
    settings = {
        "model": {"layers": 6, "heads": 2, "width": 8, "vocab_size": 24, "layer_scale": layer_scale, **model},
        "data": {"folder": "none"},
        "train": {"steps": 1, "seq_len": seq_len, "micro_batch_size": B, "global_batch_size": B},
        "memory": memory,
        "run": {"name": "r"},
        "cluster": {"gpus_per_node": 1},
    }
    config = validate(PlanConfig, settings, "test")
    again = counted(config, memory) - counted(config, {})
    assert again == pytest.approx(B * T * sum(recomputed_flops(config)))
    assert (again > 0) == (in_tiles or checkpointing != "none")


def counted(config: PlanConfig, memory: dict[str, Any]) -> int:
    """FLOPs of linear layers, and of attention."""
    model = apply_activation_checkpointing(TostLM(config.model), **memory)
    tokens = torch.randint(24, (B, T))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, output_state=False).logits.sum().backward()
    kinds = counter.get_flop_counts()["Global"]
    return kinds[torch.ops.aten.mm] + (kinds[torch.ops.aten.bmm] if "A" in config.model.pattern else 0)
