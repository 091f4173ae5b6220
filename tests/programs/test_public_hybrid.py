"""An OLMo-Hybrid folder as users have it: converted, trained in tiles on sequence ranks, returned to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tokenizers import TEXTS, byte_level
from programs import refusal, run, snapshot
from public_layers import run_in_torch
from public_models import write_olmo_hybrid, write_qwen3_5
from tokenizers import normalizers

import tost_lm
from tost_lm.testing import FLOAT32_REORDERED, assert_close

transformers = pytest.importorskip("transformers")
olmo_hybrid = pytest.importorskip("transformers.models.olmo_hybrid.modeling_olmo_hybrid")

TRAINED = [
    "data.folder=shards", "data.packing=best-fit", "train.initial_weights=models/olmo", "train.steps=3",
    "train.seq_len=96", "train.global_batch_size=2", "train.micro_batch_size=1", "optim.lr=1e-3", "optim.min_lr=1e-4",
    "validation.every=3", "validation.sequences=2",
]  # fmt: skip


def metrics(workplace: Path, name: str) -> list[float]:
    rows = (workplace / f"runs/{name}/metrics.jsonl").read_text().splitlines()
    return [json.loads(row)[key] for row in rows for key in ("loss", "grad_norm")]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a folder `Olmo` of transformers, the model folder that it becomes, and shards of its tokenizer."""
    folder = tmp_path_factory.mktemp("olmo")
    write_olmo_hybrid(folder / "Olmo")
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / f"texts/{number}.txt").write_text("\n".join(TEXTS[number % 7 :]))
    (folder / "empty.toml").touch()
    printed = run("tost convert", "Olmo", "convert.folder=models/olmo", cwd=folder)
    assert printed.startswith("Olmo: 4 layers, pattern DDDA: D gated delta rule, linear in time, A softmax attention; ")
    words = ["corpus.source=texts", "corpus.valid_fraction=0.2", "shards.folder=shards", "tokenizer.kind=hf"]
    words += ["tokenizer.path=Olmo/tokenizer.json", "tokenizer.eot_token=<|endoftext|>"]
    run("tost prepare shards", *words, cwd=folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad(), run_in_torch(olmo_hybrid, torch.float32):
        return model.eval()(torch.arange(60)[None] * 6).logits


def test_the_model_folder_has_its_logits_tokenizer_and_source(workplace: Path):
    theirs = logits(transformers.OlmoHybridForCausalLM.from_pretrained(workplace / "Olmo"))
    for name in ("models/olmo", "Olmo"):
        assert_close(logits(tost_lm.load(workplace / name)), theirs, FLOAT32_REORDERED)
        assert tost_lm.load_tokenizer(workplace / name).vocab_size == 400
    run("tost convert", "models/olmo", "convert.folder=same", "convert.to=olmo-hybrid", cwd=workplace)
    read, same = (
        transformers.OlmoHybridConfig.from_pretrained(workplace / name).to_dict() for name in ("Olmo", "same")
    )
    assert {**same, "_name_or_path": read["_name_or_path"]} == read
    card = (workplace / "models/olmo/README.md").read_text()
    assert "| converted from | Olmo, OLMo-Hybrid of the Hugging Face library |" in card


@pytest.mark.slow
def test_hybrids_of_transformers_retrieve_on_this_device(workplace: Path):
    """Without a GPU, too, where the kernels of fla-core that transformers chooses do not run."""
    write_qwen3_5(workplace / "Qwen")
    (workplace / "text.txt").write_text("\n".join(TEXTS))
    words = ["needle", "needle.haystack=text.txt", "needle.lengths=[300]", "needle.samples=3", "needle.depths=[0.5]"]
    nats = {}
    for name in ("Qwen", "Olmo", "models/olmo"):
        run("tost eval", name, *words, cwd=workplace)
        (cell,) = json.loads((workplace / name / "eval/needle@words/results.json").read_text())["cells"]
        nats[name] = cell["answer_nats"]
    assert 0 < nats["Qwen"] < 100
    assert nats["Olmo"] == pytest.approx(nats["models/olmo"], rel=FLOAT32_REORDERED)


@pytest.mark.slow
def test_training_in_tiles_on_sequence_ranks_is_that_of_one_process(workplace: Path):
    run("tost train", "empty.toml", *TRAINED, "run.name=whole", cwd=workplace)
    tiles = ["run.name=tiles", "memory.tile_tokens=32", "parallel.sequence=2"]
    said = run("tost train", "empty.toml", *TRAINED, *tiles, cwd=workplace, ranks=2)
    assert "exactly in 3 tiles of 32 tokens" in said
    assert metrics(workplace, "tiles") == pytest.approx(metrics(workplace, "whole"), rel=FLOAT32_REORDERED)

    run("tost convert", "runs/tiles", "convert.folder=back", "convert.to=olmo-hybrid", cwd=workplace)
    back, found = transformers.OlmoHybridForCausalLM.from_pretrained(workplace / "back", output_loading_info=True)
    assert not any(found.values()), found
    assert_close(logits(back), logits(tost_lm.load(workplace / "runs/tiles")), FLOAT32_REORDERED)
    assert back.config.max_position_embeddings == 1 << 20
    tokenizer = transformers.AutoTokenizer.from_pretrained(workplace / "back")
    assert tokenizer.decode(tokenizer("Page 3. They say")["input_ids"]) == "Page 3. They say"
    assert tokenizer.eos_token_id == back.config.eos_token_id == 1


def test_nothing_is_scored_where_the_tokenizer_loses_text(tmp_path: Path):
    write_olmo_hybrid(tmp_path / "Olmo", normalizers.Replace("colour", "color"))
    (tmp_path / "empty.toml").touch()
    (tmp_path / "text.txt").write_text("They say little.\nIt has the colour blue, they say.")
    (tmp_path / "texts.jsonl").write_text('{"text": "They say."}\n{"text": "It has the colour blue, they say."}\n')
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS * 3))
    run("tost convert", "Olmo", "convert.folder=models/olmo", cwd=tmp_path)
    words = ["corpus.source=corpus.txt", "corpus.text_documents=line", "corpus.valid_fraction=0.2"]
    words += ["shards.folder=shards", "tokenizer.kind=hf", "tokenizer.path=Olmo/tokenizer.json"]
    run("tost prepare shards", *words, "tokenizer.eot_token=<|endoftext|>", cwd=tmp_path)
    before = snapshot(tmp_path)
    in_training = [*TRAINED, "run.name=new", "evaluation.every=1", 'evaluation.tasks=["lambada_openai@lm-eval"]']
    for program, *words in (
        ["tost eval", "models/olmo", "text", "text.file=text.txt"],
        ["tost train", "empty.toml", *in_training, "evaluation.sets.lambada_openai=texts.jsonl"],
    ):
        printed = refusal(program, *words, cwd=tmp_path)
        name = "shards" if program == "tost train" else "text@bpb: models/olmo"
        assert printed.startswith(f"{name}: the tokenizer is not lossless, so scores of this text would be wrong: ")
        assert "it decodes 's the colour blue, t' as 's the color blue, th'; remove such characters" in printed
    assert snapshot(tmp_path) == before


def test_mistakes_are_named(workplace: Path, tmp_path: Path):
    before = snapshot(workplace)
    tensor = [*TRAINED, "run.name=new", "parallel.tensor=2"]
    printed = refusal("tost train", "empty.toml", *tensor, cwd=workplace)
    assert "tensor ranks cannot split softmax.qk_norm all-heads; set parallel.tensor=1 and use" in printed
    assert snapshot(workplace) == before
    write_olmo_hybrid(tmp_path / "Olmo")
    (tmp_path / "Olmo/tokenizer.json").write_text("{")
    printed = refusal("tost convert", "Olmo", "convert.folder=new", cwd=tmp_path)
    assert printed.startswith("Olmo/tokenizer.json: damaged: ")
    byte_level(normalizer=normalizers.Replace("ß", "")).save(str(tmp_path / "Olmo/tokenizer.json"))
    printed = refusal("tost convert", "Olmo", "convert.folder=new", cwd=tmp_path)
    assert "Olmo/tokenizer.json: the tokenizer is not lossless: it decodes " in printed
    (tmp_path / "Olmo/tokenizer.json").unlink()
    printed = refusal("tost convert", "Olmo", "convert.folder=new", cwd=tmp_path)
    assert printed.endswith("400 ids; give convert.tokenizer=FOLDER")
    assert not (tmp_path / "new").exists()
