"""Qwen3.5 as it is published, text within images, in odd sizes and with YaRN. Weights are drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from public_models import qwen3_5, write_with_images
from safetensors.torch import load_file
from test_public_forms import assert_equal_bits, run_theirs

from tost_lm.config import find_recipe, load_config
from tost_lm.interop.load import read_config
from tost_lm.interop.public_tokenizer import read_their_tokenizer
from tost_lm.interop.qwen3_5 import FORM as QWEN3_5
from tost_lm.model import TostLM
from tost_lm.pretrain.changes import require_same_model
from tost_lm.pretrain.settings import PretrainConfig

LENGTH = 24
ROPE = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH, "rope_theta": 1e7,
    "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True,
}  # fmt: skip
SHAPE = {
    "vocab_size": 997, "hidden_size": 40, "intermediate_size": 24, "num_hidden_layers": 7, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 4 * LENGTH, "rope_parameters": ROPE,
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_an_odd_model_with_images_is_that_of_transformers_at_four_times_its_length(tmp_path: Path, *, tied: bool):
    text = qwen3_5(**SHAPE, tie_word_embeddings=tied)
    for parameter in text.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    write_with_images(tmp_path / "theirs", text.bfloat16())
    config, weights, *_ = QWEN3_5.read(tmp_path / "theirs")
    assert (config.letters, config.tied_head) == ("DDDADDD", tied)
    ours = TostLM(config).double().eval()
    ours.load_state_dict(weights)
    theirs: Any = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "theirs", dtype=torch.float64)
    tokens_BT = torch.randint(997, (2, 4 * LENGTH))
    with run_theirs("Qwen3.5", torch.float64):
        part = theirs.model.language_model
        part.rotary_emb = type(part.rotary_emb)(part.config)
        expected_BTV = theirs.eval()(tokens_BT).logits
    torch.testing.assert_close(ours(tokens_BT).logits, expected_BTV, rtol=1e-10, atol=1e-10)

    tokenizer = read_their_tokenizer(tmp_path / "theirs")
    QWEN3_5.write(tmp_path / "back", config, weights, tokenizer, as_read=True, like=tmp_path / "theirs")
    read, written = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert_equal_bits(written, read)
    assert {weight.dtype for name, weight in written.items() if "visual" not in name} >= {torch.bfloat16}
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (tmp_path / "theirs/config.json").read_text()
    )
    QWEN3_5.write(tmp_path / "alone", config, weights, tokenizer, as_read=True)
    assert_equal_bits(QWEN3_5.read(tmp_path / "alone").weights, weights)


PUBLISHED = {
    "4b": {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
    "9b": {},
    "27b": {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "linear_num_value_heads": 48,
    },
}  # fmt: skip
"""Where the text parts of Qwen/Qwen3.5-4B, -9B and -27B differ from the defaults of transformers."""


@pytest.mark.quick
@pytest.mark.parametrize("size", PUBLISHED)
def test_a_preset_is_the_model_that_a_published_folder_describes(tmp_path: Path, size: str):
    """Without weights. The recipe has this model, so it starts from the converted folder."""
    scaled = ("factor", "original_max_position_embeddings")
    rope = {name: value for name, value in ROPE.items() if name not in scaled} | {"rope_type": "default"}
    text = {**PUBLISHED[size], "max_position_embeddings": 262_144, "rope_parameters": rope}
    tied = text.get("tie_word_embeddings", False)
    transformers.Qwen3_5Config(text_config=text, tie_word_embeddings=tied).save_pretrained(tmp_path)
    recipe = load_config(PretrainConfig, find_recipe(Path(f"qwen3_5_{size}")), ["stages=[]"]).model
    require_same_model(read_config(tmp_path), recipe, "test")
    assert recipe.context_length == 262_144
    assert recipe.rotary == read_config(tmp_path).rotary
