"""`tost convert` as a user runs it: the released code's checkpoints, and refused sources."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tokenizers import byte_level, made
from programs import refusal, run, snapshot
from released_code import to_released
from shared_data import needs_shared, write_gpt2

import tost_lm
from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import validate
from tost_lm.errors import CheckpointError, DataError
from tost_lm.files import sha256_file
from tost_lm.model import ModelConfig, TostLM

PROGRAM = "tost convert"
SIZES = {"layers": 2, "heads": 2, "width": 8, "max_positions": 16}


def make_model(**settings: Any) -> TostLM:
    torch.manual_seed(0)
    model = TostLM(validate(ModelConfig, {**SIZES, "layer_scale": 1e-5, **settings}, "test"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(16)[None] * 2000).logits


@needs_shared
def test_a_ckpt_becomes_a_model_folder(tmp_path: Path):
    model = make_model(vocab_size=50304)
    torch.save(to_released(model, 600000), tmp_path / "ckpt.pt")
    words = ["ckpt.pt", "convert.folder=models/tost", f"convert.tokenizer={write_gpt2(tmp_path / 'gpt2')}"]
    assert torch.equal(logits(tost_lm.load(tmp_path / "ckpt.pt")), logits(model))
    read, written = run(PROGRAM, *words, cwd=tmp_path).splitlines()
    assert read.startswith(
        "ckpt.pt: 2 layers, token statistics (TSSA), linear in time; width 8, 2 heads, vocabulary 50"
    )
    assert f"; {model.parameter_count():,} parameters without positions after 600,000 iterations" in read
    assert written == "written to models/tost: tost generate models/tost"
    assert torch.equal(logits(tost_lm.load(tmp_path / "models/tost")), logits(model))
    assert tost_lm.load_tokenizer(tmp_path / "models/tost").encode("Hello world") == [15496, 995]
    card = (tmp_path / "models/tost/README.md").read_text()
    assert "\n# tost\n" in card
    assert "| converted from | ckpt.pt, ckpt.pt of the released code (arXiv 2412.17810) |" in card
    assert f"| SHA-256 of ckpt.pt | {sha256_file(tmp_path / 'ckpt.pt')} |\n| iterations there | 600,000 |" in card
    run("tost generate", "models/tost", "Hello world", "sample.tokens=5", cwd=tmp_path)

    before = snapshot(tmp_path / "models")
    assert refusal(PROGRAM, *words, cwd=tmp_path) == "models/tost: exists already; give another convert.folder"
    assert snapshot(tmp_path / "models") == before


def test_weights_alone_are_no_branch(workplace: Path):
    settings = ["run.toml", "train.steps=2", "model.layer_scale=1e-5"]
    run("tost train", *settings, cwd=workplace)
    step = workplace / "runs/tiny/checkpoints/step_00000002"
    torch.save(to_released(tost_lm.load(step), iterations=4), workplace / "ckpt.pt")
    run(PROGRAM, "ckpt.pt", "convert.folder=weights", f"convert.tokenizer={step}", cwd=workplace)
    printed = refusal("tost train", *settings, "run.name=new", "train.branch_from=weights", cwd=workplace)
    assert printed.startswith("train.branch_from weights: has no optimizer state of a run; set train.initial_weights")


def test_refused_sources_are_one_line_and_leave_nothing(tmp_path: Path):
    torch.save(to_released(model := make_model(vocab_size=400), 0), tmp_path / "small.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    write_checkpoint(tmp_path / "ours", model.config, model.state_dict(), made(byte_level()))
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts/config.json").write_text('{"model_type": "qwen3_5_moe"}')
    before = snapshot(tmp_path)
    neither = "not a ckpt.pt and no folder of the Hugging Face library, with config.json; give one of these"
    problems = {
        "text.pt": "damaged, or not a file of torch.save; copy it again",
        "ours": f"{neither} or, for a model folder, another convert.to",
        "nowhere": neither,
        "experts/config.json": "unsupported model_type: 'qwen3_5_moe' (Qwen3.5 with experts); train it with "
        "ms-swift or Megatron-Bridge",
    }
    for source, problem in problems.items():
        path = source.removesuffix("/config.json")
        assert refusal(PROGRAM, path, "convert.folder=models/new", cwd=tmp_path) == f"{source}: {problem}"
    words = ["small.pt", "convert.folder=models/new"]
    printed = refusal(PROGRAM, *words, "convert.tokenizer=nowhere", cwd=tmp_path)
    assert printed.startswith("convert.tokenizer nowhere: no tokenizer; give a folder with tokenizer.json or one of ")
    assert refusal(PROGRAM, *words, cwd=tmp_path) == "small.pt: no tokenizer.json; give convert.tokenizer=FOLDER"
    with pytest.raises(DataError, match=r"small\.pt: no tokenizer; make a model folder with tost convert"):
        tost_lm.load_tokenizer(tmp_path / "small.pt")
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        tost_lm.load_tokenizer(tmp_path / "nowhere")
    printed = refusal(PROGRAM, "small.pt", "convert.folder=small.pt/x", "convert.tokenizer=ours", cwd=tmp_path)
    assert printed == "small.pt/x: cannot be written: Not a directory"
    printed = refusal(PROGRAM, "ours", "convert.folder=x", "convert.to=llama", "convert.tokenizer=y", cwd=tmp_path)
    assert printed == "command line: convert.tokenizer y: only for convert.to=ours; leave it out"
    assert snapshot(tmp_path) == before
