"""Folders of the Hugging Face library: which of their files are read, and crafted ones."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tokenizers import EOT, byte_level
from programs import run_here
from safetensors.torch import load_file, save_file
from torch import Tensor

import tost_lm
from tost_lm.checkpointing.run_folder import find_checkpoint
from tost_lm.errors import CheckpointError, ConfigError, TostError
from tost_lm.files import sha256_file
from tost_lm.inference.hugging_face import find_evaluated
from tost_lm.interop.load import OTHER_TOOLS, read_config

transformers = pytest.importorskip("transformers")

NO_FORM = {
    "qwen3_5_moe": r"\(Qwen3\.5 with experts\); train it with ms-swift or Megatron-Bridge$",
    "qwen3_5_moe_text": r"\(Qwen3\.5 with experts\); train it with ms-swift or Megatron-Bridge$",
    "qwen3_moe": r"\(Qwen3 with experts\); train it with ms-swift or Megatron-Bridge$",
    "qwen3_next": r"\(Qwen3-Next, which has experts\); train it with ms-swift or Megatron-Bridge$",
    "mixtral": r"\(Mixtral, which has experts\); train it with ms-swift$",
    "kimi_linear": r"\(Kimi Linear, which has experts and latent attention\); train it with flame, with fla$",
}
READERS: dict[str, Callable[[Path], Any]] = {
    "loaded": tost_lm.load,
    "evaluated": lambda folder: find_evaluated(folder).load("cpu"),
    "loaded from a URL": lambda folder: tost_lm.load(f"file://{folder}"),
}


def write_theirs(folder: Path, seed: int = 0, shard: str = "1GB") -> None:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    ids = {"vocab_size": 400, "bos_token_id": None, "eos_token_id": byte_level().token_to_id(EOT)}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ids))
    model.save_pretrained(folder, max_shard_size=shard)
    transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token=EOT).save_pretrained(folder)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(torch.arange(40)[None]).logits


@pytest.fixture(params=["1GB", "20KB"], ids=["one file", "shards"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With weights of an older model beside those of the model."""
    monkeypatch.setenv("TOST_CACHE", str(tmp_path / "cache"))
    write_theirs(tmp_path / "older", seed=1)
    write_theirs(tmp_path / "shards", seed=1, shard="1KB")
    write_theirs(tmp_path / "theirs", shard=request.param)
    shutil.copyfile(tmp_path / "older/model.safetensors", tmp_path / "theirs/model_old.safetensors")
    shutil.copyfile(tmp_path / "older/model.safetensors", tmp_path / "theirs/consolidated.safetensors")
    for path in (tmp_path / "shards").glob("model-*"):
        assert not (tmp_path / "theirs" / path.name).exists()
        shutil.copyfile(path, tmp_path / "theirs" / path.name)
    return tmp_path / "theirs"


@pytest.mark.parametrize("reader", READERS)
def test_only_the_weights_of_the_model_are_read(folder: Path, reader: str):
    expected = logits(transformers.LlamaForCausalLM.from_pretrained(folder))
    before = find_evaluated(folder).hashes()
    torch.testing.assert_close(logits(READERS[reader](folder)), expected)
    for path in folder.glob("*_old.safetensors"):
        path.unlink()
    assert find_evaluated(folder).hashes() == before


def test_a_converted_model_has_these_weights_and_names_their_files(folder: Path):
    run_here("tost convert", folder, f"convert.folder={folder.parent}/ours", cwd=folder.parent)
    expected = logits(transformers.LlamaForCausalLM.from_pretrained(folder))
    torch.testing.assert_close(logits(tost_lm.load(folder.parent / "ours")), expected)
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    record = json.loads((folder.parent / "ours/conversion.json").read_text())
    assert record["sha256"] == {name: sha256_file(folder / name) for name in names}


def without_a_shard(folder: Path) -> None:
    (folder / "model-00002-of-00004.safetensors").unlink()


def with_a_whole_file(folder: Path) -> None:
    save_file(load_file(folder / "model-00001-of-00004.safetensors"), folder / "model.safetensors")


def indexed(index: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("reader", ["loaded", "evaluated"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without_a_shard, r"model-00002-of-00004\.safetensors: missing, but \S+index\.json names it; copy the "),
        (with_a_whole_file, r"theirs: weights of two models: model\.safetensors, and the files that \S+ names; remo"),
        (indexed({"weight_map": {"a": "../model.safetensors"}}), r"index\.json: damaged: no index of weights in this "),
        (indexed({"weight_map": {}}), r"index\.json: damaged: no index of weights in this folder; copy it again$"),
        (indexed({"weight_map": {"a": 1}}), r"index\.json: damaged: no index of weights in this folder; copy it"),
        (indexed([]), r"index\.json: damaged: no index of weights in this folder; copy it again$"),
    ],
)  # fmt: skip
def test_weights_that_an_index_does_not_describe_are_refused(
    tmp_path: Path, change: Callable[[Path], object], problem: str, reader: str
):
    write_theirs(tmp_path / "theirs", shard="20KB")
    assert (tmp_path / "theirs/model-00003-of-00004.safetensors").exists()
    change(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=problem):
        READERS[reader](tmp_path / "theirs")


def test_a_weight_in_two_files_is_refused(tmp_path: Path):
    write_theirs(tmp_path, shard="20KB")
    first, second = (tmp_path / f"model-0000{n}-of-00004.safetensors" for n in (1, 2))
    name, weight = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: weight}, second, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"00002-of-00004\.safetensors: \S+ is in another file, too; remove the fi"
    ):
        tost_lm.load(tmp_path)


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


CRAFTED = [
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": -1}, {"num_hidden_layers": 99}, {"num_labels": 10**18},
    {"hidden_size": 10**9}, {"vocab_size": 10**30}, {"intermediate_size": 10**6}, {"intermediate_size": 8},
    {"num_attention_heads": 0}, {"num_key_value_heads": -2}, {"max_position_embeddings": "x" * 10_000},
    {"rope_theta": None}, {"rope_theta": "x" * 10_000}, {"rope_parameters": []}, {"layer_types": ["full_attention"]},
    {"layer_types": "full_attention"}, {"text_config": []}, {"text_config": {"num_hidden_layers": 10**12}},
    {"torch_dtype": "float99"}, {"model_type": ["llama"]}, {"model_type": None}, {"to_dict": 1}, {"eos_token_id": {}},
]  # fmt: skip
ODD = [0, -1, 10**9, 10**18, math.nan, math.inf, None, True, "x", [], {}, [1], {"0": {}}, ["full_attention"] * 3]


@pytest.mark.parametrize("reader", ["loaded", "evaluated"])
def test_a_crafted_folder_is_refused_in_one_line_or_read(tmp_path: Path, reader: str):
    """Some settings are chosen, others drawn; no reader allocates what a setting says."""
    write_theirs(tmp_path)
    whole, draw = json.loads((tmp_path / "config.json").read_text()), random.Random(0)
    drawn = [{draw.choice([*whole, "head_dim", "per_layer_config"]): draw.choice(ODD)} for _ in range(30)]
    texts = [json.dumps(whole | change) for change in CRAFTED + drawn]
    nestings = [json.dumps(whole)[:-1] + f', "a": {nested(depth)}}}' for depth in (150, 400, 900, 100_000)]
    for text in [*texts, *nestings, "[]", "[" * 100_000, "", '"\\ud800"']:
        (tmp_path / "config.json").write_text(text)
        refused = ""
        try:
            READERS[reader](tmp_path)
        except TostError as error:
            refused = str(error)
        assert all(len(line) < 600 for line in refused.splitlines()), refused
        assert refused.count("\n") < 2, refused


@pytest.mark.parametrize("reader", ["loaded", "evaluated"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_hidden_layers": 10**9}, r"config\.json: unsupported num_hidden_layers: 1000000000; give a model"),
        ({"num_hidden_layers": -1}, r"config\.json: unsupported num_hidden_layers: -1; give a model with 0 to 10,000$"),
        ({"intermediate_size": 8}, r"mlp\.\w+_proj\.weight has shape \[.*\], its settings say \[.*\]; copy it again$"),
        ({"layer_types": ["full_attention"]}, r"`num_hidden_layers` \(3\) must be equal to the number of `layer_type"),
        ({"hidden_size": 10**6}, r"its settings say|has shape"),
    ],
)  # fmt: skip
def test_settings_that_the_weights_do_not_have_are_named(
    tmp_path: Path, change: dict[str, Any], problem: str, reader: str
):
    write_theirs(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((CheckpointError, ConfigError), match=problem) as error:
        READERS[reader](tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize("kind", NO_FORM)
def test_models_without_a_form_are_named_with_what_trains_them(tmp_path: Path, kind: str):
    assert OTHER_TOOLS.keys() == NO_FORM.keys()
    transformers.CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    for read in (tost_lm.load, read_config):
        with pytest.raises(CheckpointError, match=f"config.json: unsupported model_type: '{kind}' {NO_FORM[kind]}"):
            read(tmp_path)


@pytest.mark.quick
def test_adapters_are_refused_also_beside_a_model(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for _ in range(2):
        for read in (tost_lm.load, read_config, find_checkpoint):
            with pytest.raises(CheckpointError, match=r": adapters \(LoRA\) are not read; merge them into their model"):
                read(tmp_path)
        write_theirs(tmp_path)


@pytest.mark.quick
def test_a_folder_of_the_library_is_no_checkpoint_before_its_conversion(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="is a folder of the Hugging Face library; convert it with tost convert"):
        find_checkpoint(tmp_path)
