"""Folders of public hybrids as users have them: converted, trained in tiles on sequence ranks, written back."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tokenizers import TEXTS, byte_level
from programs import curve, refusal, refusal_here, run, run_here, snapshot
from public_layers import run_in_torch
from public_models import write_olmo_hybrid, write_qwen3_5
from safetensors.torch import load_file, save_file
from tokenizers import normalizers

import tost_lm
from tost_lm.interop.hf import TostForCausalLM
from tost_lm.testing import FLOAT32_REORDERED, assert_close

transformers = pytest.importorskip("transformers")

KINDS = {"Olmo": ("OLMo-Hybrid", "olmo-hybrid", 1 << 20), "Qwen": ("Qwen3.5", "qwen3-5", 32768)}
"""Title, word of convert.to, and positions after training."""
TRAINED = [
    "data.folder=shards", "data.packing=best-fit", "train.steps=3", "train.seq_len=96",
    "train.global_batch_size=2", "train.micro_batch_size=1", "optim.lr=1e-3", "optim.min_lr=1e-4",
    "validation.interval=3", "validation.sequences=2",
]  # fmt: skip
PROMPT, GENERATED = torch.arange(7)[None] * 11, [
    {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "eos_token_id": None} for beams in (1, 3)
]  # fmt: skip
FRESH = """
import json, shutil, sys
sys.modules["tost_lm"] = None
if shutil.which("nvidia-smi"):  # fla-core is installed, and tests see no GPU
    sys.modules["fla"] = None
import torch
from transformers import AutoModelForCausalLM
model, (prompt, generated) = AutoModelForCausalLM.from_pretrained(sys.argv[1]), json.loads(sys.argv[2])
print(json.dumps([model.generate(torch.tensor(prompt), **options).tolist() for options in generated]))
"""
"""Generates without this package."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With folders `Olmo` and `Qwen` of transformers, the model folders that they become, and shards of their
    tokenizer."""
    folder = tmp_path_factory.mktemp("hybrids")
    write_olmo_hybrid(folder / "Olmo")
    write_qwen3_5(folder / "Qwen")
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / f"texts/{number}.txt").write_text("\n".join(TEXTS[number % 7 :]))
    (folder / "empty.toml").touch()
    for name in KINDS:
        printed = run_here("tost convert", name, f"convert.folder=models/{name}", cwd=folder)
        kinds = "pattern DDDA: D gated delta rule, linear in time, A softmax attention; "
        assert printed.startswith(f"{name}: 4 layers, {kinds}")
    words = ["corpus.source=texts", "corpus.valid_fraction=0.2", "shards.folder=shards"]
    words += ["tokenizer.path=Olmo/tokenizer.json", "tokenizer.eot_token=<|endoftext|>"]
    run_here("tost prepare shards", *words, cwd=folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    module = sys.modules[type(model).__module__]
    with torch.no_grad(), run_in_torch(module, torch.float32):
        return model.eval()(torch.arange(60)[None] * 6).logits


@pytest.mark.parametrize("name", KINDS)
def test_the_model_folder_has_its_logits_tokenizer_and_source(workplace: Path, name: str):
    theirs, (title, to, _) = logits(transformers.AutoModelForCausalLM.from_pretrained(workplace / name)), KINDS[name]
    for folder in (f"models/{name}", name):
        assert_close(logits(tost_lm.load(workplace / folder)), theirs, FLOAT32_REORDERED)
        assert tost_lm.load_tokenizer(workplace / folder).vocab_size == 400
    run_here("tost convert", f"models/{name}", f"convert.folder=same/{name}", f"convert.to={to}", cwd=workplace)
    read, same = (transformers.AutoConfig.from_pretrained(workplace / x).to_dict() for x in (name, f"same/{name}"))
    assert {**same, "_name_or_path": read["_name_or_path"]} == read
    card = (workplace / f"models/{name}/README.md").read_text()
    assert f"| converted from | {name}, {title} of the Hugging Face library |" in card


@pytest.mark.slow
def test_hybrids_of_transformers_retrieve_on_this_device(workplace: Path):
    """Without a GPU, too, where the kernels of fla-core that transformers chooses do not run."""
    (workplace / "text.txt").write_text("\n".join(TEXTS))
    words = ["needle", "needle.haystack=text.txt", "needle.lengths=[300]", "needle.samples=3", "needle.depths=[0.5]"]
    nats = {}
    for name in (*KINDS, *(f"models/{name}" for name in KINDS)):
        run("tost eval", name, *words, cwd=workplace)
        (cell,) = json.loads((workplace / name / "eval/needle@keys/results.json").read_text())["cells"]
        nats[name] = cell["answer_nats"]
    for name in KINDS:
        assert nats[name] == pytest.approx(nats[f"models/{name}"], rel=FLOAT32_REORDERED)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_training_in_tiles_on_sequence_ranks_is_that_of_one_process(workplace: Path, name: str):
    words, (_, to, positions), back = [*TRAINED, f"train.initial_weights=models/{name}"], KINDS[name], f"back/{name}"
    run("tost train", "empty.toml", *words, f"run.name=whole_{name}", cwd=workplace)
    tiles = [f"run.name=tiles_{name}", "memory.tile_tokens=32", "parallel.sequence=2"]
    said = run("tost train", "empty.toml", *words, *tiles, cwd=workplace, ranks=2)
    assert "exactly in 3 tiles of 32 tokens" in said
    whole = [pytest.approx(step, rel=FLOAT32_REORDERED) for step in curve(workplace, f"whole_{name}")]
    assert curve(workplace, f"tiles_{name}") == whole

    run_here("tost convert", f"runs/tiles_{name}", f"convert.folder={back}", f"convert.to={to}", cwd=workplace)
    back, found = transformers.AutoModelForCausalLM.from_pretrained(workplace / back, output_loading_info=True)
    assert not any(found.values()), found
    assert_close(logits(back), logits(tost_lm.load(workplace / f"runs/tiles_{name}")), FLOAT32_REORDERED)
    assert back.config.max_position_embeddings == positions
    tokenizer = transformers.AutoTokenizer.from_pretrained(workplace / f"back/{name}")
    assert tokenizer.decode(tokenizer("Page 3. They say")["input_ids"]) == "Page 3. They say"
    assert tokenizer.eos_token_id == back.config.eos_token_id == 1
    assert "library_name: transformers" in (workplace / f"back/{name}/README.md").read_text()
    ours: Any = TostForCausalLM.from_run(workplace / f"runs/tiles_{name}")
    expected = [ours.generate(PROMPT, **options).tolist() for options in GENERATED]
    words = [sys.executable, "-c", FRESH, f"back/{name}", json.dumps([PROMPT.tolist(), GENERATED])]
    printed = subprocess.run(words, cwd=workplace, check=True, capture_output=True, text=True).stdout
    assert json.loads(printed) == expected


def test_what_is_left_out_is_named(workplace: Path, tmp_path: Path):
    shutil.copytree(workplace / "Qwen", tmp_path / "Qwen")
    path = tmp_path / "Qwen/model.safetensors"
    save_file(load_file(path) | {"mtp.fc.weight": torch.ones(2)}, path, metadata={"format": "pt"})
    printed = run_here("tost convert", "Qwen", "convert.folder=ours", cwd=tmp_path)
    assert "\nleft out: mtp (several tokens at once)\n" in printed


def test_mistakes_are_named(workplace: Path, tmp_path: Path):
    before = snapshot(workplace)
    tensor = [*TRAINED, "run.name=new", "parallel.tensor=2", "train.initial_weights=models/Olmo"]
    printed = refusal("tost train", "empty.toml", *tensor, cwd=workplace)
    assert "tensor ranks cannot split softmax.qk_norm all-heads; set parallel.tensor=1 and use" in printed
    assert snapshot(workplace) == before
    write_olmo_hybrid(tmp_path / "Olmo")
    (tmp_path / "Olmo/tokenizer.json").write_text("{")
    printed = refusal_here("tost convert", "Olmo", "convert.folder=new", cwd=tmp_path)
    assert printed.startswith("tokenizer.path Olmo: damaged: not a tokenizer.json")
    byte_level(normalizer=normalizers.Replace("ß", "")).save(str(tmp_path / "Olmo/tokenizer.json"))
    printed = refusal_here("tost convert", "Olmo", "convert.folder=new", cwd=tmp_path)
    assert "Olmo/tokenizer.json: the tokenizer is not lossless: it decodes " in printed
    assert not (tmp_path / "new").exists()
