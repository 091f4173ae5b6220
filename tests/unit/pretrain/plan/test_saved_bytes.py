"""The plan's bytes of activations beside those of the tensors that autograd saves in a block."""

from typing import Any, Literal

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tost_lm.config import validate
from tost_lm.model import TostLM
from tost_lm.model.transforms import apply_activation_checkpointing
from tost_lm.ops.positions import SequenceInfo
from tost_lm.pretrain.plan.activations import activation_bytes_per_token
from tost_lm.pretrain.settings import PretrainConfig

B, T, C = 2, 512, 256
DTYPES: dict[str, tuple[torch.dtype, int]] = {"float32": (torch.float32, 4), "bfloat16": (torch.bfloat16, 2)}


@pytest.mark.parametrize("memory", [{}, {"activation_checkpointing": "full"}, {"mlp_tile_tokens": 128}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "model",
    [
        {"pattern": "T"},
        {"pattern": "D"},
        {"pattern": "D", "delta": {"qk_heads": 2, "value_heads": 4, "qk_size": 24}},
        {"pattern": "D", "delta": {"value_size": 24, "decay_per_channel": True}},
        {"pattern": "T", "norm": "rms", "mlp": "swiglu"},
        {"pattern": "A", "softmax": {"kv_heads": 2}},
        {"pattern": "A", "softmax": {"kv_heads": 1, "qk_norm": True}},
        {"pattern": "A", "softmax": {"rope_theta": 0.0, "qk_norm": True}},
        {"pattern": "A", "softmax": {"kv_heads": 2, "gate": True, "head_size": 80, "rotary_fraction": 0.25}},
        {"pattern": "A", "norm": "rms-zero-centered", "softmax": {"gate": True, "qk_norm": True, "window": 100}},
        {"pattern": "A", "softmax": {"gate": True, "rope_theta": 0.0}},
        {"pattern": "A", "softmax": {"conv": True, "kv_heads": 2, "qk_norm": True}},
        {"pattern": "A", "norm": "rms", "norm_after": "A", "softmax": {"kv_heads": 2, "qk_norm": "all-heads"}},
        {"pattern": "D", "norm_after": "D", "mlp": "swiglu", "mlp_hidden": 72, "layer_scale": 0.0},
    ],
)
def test_a_block_saves_the_planned_bytes(
    model: dict[str, Any], dtype: Literal["float32", "bfloat16"], memory: dict[str, Any]
):
    torch_dtype, element_bytes = DTYPES[dtype]
    settings = {
        "model": {"layers": 1, "heads": 4, "width": C, "vocab_size": 64, **model},
        "data": {"folder": "none"},
        "train": {"steps": 1, "seq_len": T, "micro_batch_size": B, "global_batch_size": B, "dtype": dtype},
        "memory": memory,
        "run": {"name": "r", "device": "cpu"},
    }
    config = validate(PretrainConfig, settings, "test")
    lm = TostLM(config.model).to(torch_dtype)
    apply_activation_checkpointing(lm, **memory)
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # by address; holds them, so that no address is used twice

    def save(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    info = SequenceInfo.of(torch.zeros(B, T, dtype=torch.long), None, None, output_state=False)
    info = info.with_rotary(config.model.rotary, torch_dtype)
    weights |= {x.untyped_storage().data_ptr() for x in info.rotary or ()}
    with saved_tensors_hooks(save, lambda x: x):
        lm.blocks[0](torch.randn(B, T, C, requires_grad=True), None, info)
    last_norm = {"layer": element_bytes, "rms": 8}.get(config.model.norm, 4 + element_bytes) * C
    planned = (activation_bytes_per_token(config) - last_norm) * B * T
    assert planned == pytest.approx(sum(storage.nbytes() for storage in saved.values()), rel=3e-3)
