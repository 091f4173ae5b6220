"""GPT-2 folders of the Hugging Face library: equal logits, tokenizer, refused folders."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shared_data import GPT2_BPE, needs_shared
from torch.testing import assert_close

from tost_lm.errors import CheckpointError, DataError
from tost_lm.interop.gpt2 import read_gpt2, read_gpt2_tokenizer
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


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("activation", "gelu", "others"),
    [("gelu_new", "tanh", {}), ("gelu", "exact", {"n_inner": 20, "layer_norm_epsilon": 1e-2})],
)
def test_logits_equal_the_library(tmp_path: Path, activation: str, gelu: str, others: dict[str, Any]):
    theirs = save_theirs(tmp_path, activation_function=activation, **others)
    config, weights, *_ = read_gpt2(tmp_path)
    assert (config.pattern, config.gelu, config.bias, config.max_positions) == ("A", gelu, True, 12)
    ours = TostLM(config)
    ours.load_state_dict(weights)
    tokens = torch.randint(40, (3, 12))
    with torch.no_grad():
        logits = ours.double().eval()(tokens).logits
        assert logits.std() > 0.5
        assert_close(logits, theirs.double()(tokens).logits, rtol=0, atol=1e-12)


def test_shards_masks_and_names_without_the_prefix_are_read(tmp_path: Path):
    save_theirs(tmp_path)
    before = read_gpt2(tmp_path).weights
    weights = {
        name.removeprefix("transformer."): weight for name, weight in load_file(tmp_path / "model.safetensors").items()
    }
    weights |= {"h.0.attn.bias": torch.ones(1, 1, 12, 12), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    names = sorted(weights)
    (tmp_path / "model.safetensors").unlink()
    for number, some in enumerate((names[:5], names[5:]), 1):
        save_file({name: weights[name] for name in some}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    after = read_gpt2(tmp_path).weights
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks weights: h\.0\.attn\.\S+, .* and \d+ more; copy it again$"):
        read_gpt2(tmp_path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx: True; give a model with False"),
        ({"activation_function": "relu"}, r"activation_function: 'relu'; give a model with gelu_new or "),
        ({"n_inner": 16}, r"h\.0\.mlp\.c_fc\.weight has shape \[8, 32\], its settings say \[8, 16\]"),
        ({"n_head": "2"}, r"config\.json: heads: input should be a valid integer, got '2'"),
    ],
)
def test_other_architectures_are_refused(tmp_path: Path, settings: dict, problem: str):
    save_theirs(tmp_path)
    change(tmp_path, **settings)
    with pytest.raises((CheckpointError, ValueError), match=problem) as error:
        read_gpt2(tmp_path)
    assert "\n" not in str(error.value)


def test_missing_and_damaged_files_are_named(tmp_path: Path):
    save_theirs(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged, or not a safetensors file"):
        read_gpt2(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors; load the model in transformers"):
        read_gpt2(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["n_layer"]
    for content, problem in ((json.dumps(settings), "lacks n_layer; add"), ("[1]", "damaged: not a JSON object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=problem):
            read_gpt2(tmp_path)


@needs_shared
def test_only_the_exact_tokenizer_of_gpt2_is_read(tmp_path: Path):
    assert read_gpt2_tokenizer(tmp_path) is None
    shutil.copy(GPT2_BPE / "encoder.json", tmp_path / "vocab.json")
    shutil.copy(GPT2_BPE / "vocab.bpe", tmp_path / "merges.txt")
    of_parts = read_gpt2_tokenizer(tmp_path)
    assert of_parts is not None
    assert of_parts.encode("Hello world") == [15496, 995]

    transformers.GPT2Tokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "whole")
    path = tmp_path / "whole/tokenizer.json"
    of_whole = read_gpt2_tokenizer(tmp_path / "whole")
    assert of_whole is not None
    assert of_whole.sha256 == of_parts.sha256
    tree = json.loads(path.read_text())
    others = [
        {**tree, "model": {**tree["model"], "merges": tree["model"]["merges"][::-1]}},
        {**tree, "model": {**tree["model"], "vocab": {**tree["model"]["vocab"], "new": 50257}}},
        {**tree, "pre_tokenizer": {**tree["pre_tokenizer"], "add_prefix_space": True}},
        {"version": "1.0"},
    ]
    for other in others:
        path.write_text(json.dumps(other))
        with pytest.raises(
            DataError, match=re.escape("whole: its tokenizer is not GPT-2's; if the model uses GPT-2's")
        ):
            read_gpt2_tokenizer(tmp_path / "whole")
