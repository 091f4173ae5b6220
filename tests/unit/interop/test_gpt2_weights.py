"""GPT-2 folders of the Hugging Face library: equal logits, old names of weights, refused settings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tost_lm.errors import CheckpointError
from tost_lm.interop.gpt2 import GPT2
from tost_lm.model import TostLM

transformers = pytest.importorskip("transformers")

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 12, "vocab_size": 40}


def save_theirs(folder: Path, **settings: Any) -> Any:
    """A model with weights large enough for every term to matter."""
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **ids, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.mark.quick
@pytest.mark.parametrize(
    ("activation", "gelu", "others"),
    [("gelu_new", "tanh", {}), ("gelu", "exact", {"n_inner": 20, "layer_norm_epsilon": 1e-2})],
)
def test_logits_equal_the_library(tmp_path: Path, activation: str, gelu: str, others: dict[str, Any]):
    theirs = save_theirs(tmp_path, activation_function=activation, **others)
    config, weights, *_ = GPT2.read(tmp_path)
    assert (config.pattern, config.gelu, config.bias, config.max_positions) == ("A", gelu, True, 12)
    ours = TostLM(config)
    ours.load_state_dict(weights)
    tokens = torch.randint(40, (3, 12))
    with torch.no_grad():
        logits = ours.double().eval()(tokens).logits
        assert logits.std() > 0.5
        assert_close(logits, theirs.double()(tokens).logits, rtol=0, atol=1e-12)


def test_masks_and_names_without_the_prefix_are_read_and_an_untied_head_is_refused(tmp_path: Path):
    save_theirs(tmp_path)
    before, path = GPT2.read(tmp_path).weights, tmp_path / "model.safetensors"
    weights = {name.removeprefix("transformer."): weight for name, weight in load_file(path).items()}
    weights |= {"h.0.attn.bias": torch.ones(1, 1, 12, 12), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(weights, path, {"format": "pt"})
    after = GPT2.read(tmp_path).weights
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    save_file(weights | {"lm_head.weight": weights["wte.weight"] + 1}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the token embedding; give a model with a"):
        GPT2.read(tmp_path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx: True; give a model with False"),
        ({"activation_function": "relu"}, r"activation_function: 'relu'; give a model with gelu_new or "),
    ],
)
def test_other_architectures_are_refused(tmp_path: Path, settings: dict, problem: str):
    save_theirs(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=problem) as error:
        GPT2.read(tmp_path)
    assert "\n" not in str(error.value)
