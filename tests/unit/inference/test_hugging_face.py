"""Models of the Hugging Face library as baselines: scores against a pass for every token, and rejected folders."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_tokenizers import EOT, byte_level
from safetensors.torch import load_file, save_file
from test_likelihood import brute_force, drawn_requests
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tost_lm.errors import CheckpointError
from tost_lm.inference.hugging_face import HuggingFaceCheckpoint, HuggingFaceLM, find_evaluated
from tost_lm.inference.likelihood import score_requests
from tost_lm.model.streaming import prefill
from tost_lm.testing import FLOAT32_REORDERED

SHAPES = [(1, 1), (1, 9), (5, 1), (12, 3), (3, 3), (7, 10)]
VOCAB = 400


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    settings = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(settings)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(settings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `save_pretrained` wrote, with a tokenizer that has an end but no beginning of sequence."""
    folder = tmp_path_factory.mktemp("saved") / "gpt2"
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token=EOT).save_pretrained(folder)
    gpt2().save_pretrained(folder)
    return folder


@pytest.mark.quick
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-9), (torch.float32, FLOAT32_REORDERED)])
def test_scores_equal_a_pass_for_every_token(make, dtype: torch.dtype, relative: float):
    model, requests = HuggingFaceLM(make()).to(dtype).eval(), drawn_requests(SHAPES)
    scores = score_requests(model, requests, batch_tokens=40)
    expected = [brute_force(model, request) for request in requests]
    np.testing.assert_allclose(scores.nats, [nats for nats, _ in expected], rtol=relative)
    assert scores.is_greedy.tolist() == [is_greedy for _, is_greedy in expected]


@pytest.mark.parametrize("make", [gpt2, llama])
@torch.inference_mode()
def test_tiles_equal_the_whole_text_and_a_state_can_be_used_twice(make):
    model = HuggingFaceLM(make()).double().eval()
    tokens_BT = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    whole_BTV = model(tokens_BT).logits
    output = prefill(model, tokens_BT[:, :15].split(4, 1))
    torch.testing.assert_close(output.logits, whole_BTV[:, 14:15], rtol=1e-9, atol=1e-9)
    for _ in range(2):
        more = model(tokens_BT[:, 15:], state=output.state)
        torch.testing.assert_close(more.logits, whole_BTV[:, 15:], rtol=1e-9, atol=1e-9)
    labels_BT, calls = tokens_BT.roll(-1, 1)[:, 15:], []
    model.model.register_forward_hook(lambda *_: calls.append(None))
    nats_BT = model(tokens_BT[:, 15:], labels_BT, output.state).nats
    assert len(calls) == 1
    expected_BT = -torch.log_softmax(whole_BTV[:, 15:], -1).gather(2, labels_BT[..., None])[..., 0]
    torch.testing.assert_close(nats_BT, expected_BT, rtol=1e-9, atol=1e-9)


def test_a_folder_of_the_library_is_a_subject_with_its_own_tokenizer(saved: Path):
    evaluated = find_evaluated(saved)
    assert isinstance(evaluated, HuggingFaceCheckpoint)
    assert evaluated.results_path("x") == saved / "eval/x/results.json"
    tokenizer = evaluated.tokenizer()
    text = "some words, ünknown  spaces \n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_array(text).tolist() == tokenizer.encode(text)
    assert 1 not in tokenizer.encode(f"words{EOT}")
    assert tokenizer.eot == 1
    assert max(tokenizer.encode(text)) < tokenizer.vocab_size <= VOCAB
    model = evaluated.load("cpu")
    assert (model.config.context_length, model.config.position_limit) == (32, 32)
    tokens = torch.tensor([[0, 5, 9]])
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, gpt2().eval()(tokens).logits)
        rounded = replace(evaluated, dtype="bfloat16").load("cpu")(tokens).logits
        torch.testing.assert_close(rounded, gpt2().bfloat16().eval()(tokens).logits)


def test_changed_weights_and_tokenizers_change_the_hashes(saved: Path, tmp_path: Path):
    shutil.copytree(saved, tmp_path / "copy")
    before, copy = find_evaluated(saved).hashes(), find_evaluated(tmp_path / "copy")
    assert copy.hashes() == before
    with (tmp_path / "copy/tokenizer.json").open("a") as file:
        file.write("\n")
    changed = copy.hashes()
    assert changed["checkpoint_sha256"] == before["checkpoint_sha256"]
    assert changed["tokenizer_sha256"] != before["tokenizer_sha256"]
    weights = load_file(tmp_path / "copy/model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, tmp_path / "copy/model.safetensors")
    assert copy.hashes()["checkpoint_sha256"] != before["checkpoint_sha256"]


def test_an_incomplete_model_is_rejected(saved: Path, tmp_path: Path):
    shutil.copytree(saved, tmp_path / "copy")
    weights = load_file(tmp_path / "copy/model.safetensors")
    name = next(name for name in weights if name.endswith("h.1.attn.c_attn.weight"))
    save_file(
        {key: weights[key] for key in weights if key != name}, tmp_path / "copy/model.safetensors", {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=r"copy: 1 weights of a causal language model are missing \(.*h\.1\.attn"):
        find_evaluated(tmp_path / "copy").load("cpu")
    (tmp_path / "copy/config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"copy/config\.json: damaged: not a JSON object; copy it again$"):
        find_evaluated(tmp_path / "copy")


@pytest.mark.parametrize(
    "setting",
    [
        {"_attn_implementation": "publisher/kernel"},
        {"attn_implementation": "flash_attention_2"},
        {"attn_implementation": {"": "publisher/kernel"}},
        {"per_layer_config": [{"_attn_implementation": "publisher/kernel"}]},
        {"experts_implementation": "sonicmoe"},
        {"text_config": {"quantization_config": {"quant_method": "fbgemm_fp8"}}},
    ],
    ids=str,
)
def test_settings_that_load_code_are_refused_by_name(saved: Path, tmp_path: Path, setting: dict[str, Any]):
    shutil.copytree(saved, tmp_path / "copy")
    config = tmp_path / "copy/config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | setting))
    name = max(re.findall(r"\w+(?:implementation|quantization_config)|quantization_config", str(setting)), key=len)
    with pytest.raises(
        CheckpointError, match=rf"^{config}: unsupported {name}, for which transformers loads code .*; giv"
    ):
        find_evaluated(tmp_path / "copy")
    # The library reads such a file instead, if its version is in the list.
    (tmp_path / "copy/config.5.0.0.json").write_text(config.read_text())
    config.write_text(json.dumps(settings | {"configuration_files": ["config.5.0.0.json"]}))
    with pytest.raises(CheckpointError, match="unsupported configuration_files"):
        find_evaluated(tmp_path / "copy")


def test_code_in_a_folder_is_not_run_whatever_stdin_answers(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hostile = tmp_path / "hostile"
    shutil.copytree(saved, hostile)
    (hostile / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    settings = {"model_type": "hostile", "auto_map": {"AutoConfig": "code.Hostile"}}
    (hostile / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    start = f"{hostile}: transformers rejects it: The repository {hostile} contains custom code"
    with pytest.raises(CheckpointError, match=rf"^{re.escape(start)}.*code in a model folder is never run$"):
        find_evaluated(hostile).load("cpu")
    assert not (tmp_path / "ran").exists()
