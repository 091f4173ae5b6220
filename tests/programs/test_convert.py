"""tost_lm.convert as a user runs it: the authors' checkpoints and GPT-2 in, our own out, and what is refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from forked import CHECKOUT, ENVIRONMENT
from programs import refusal, run, snapshot

import tost_lm
from tost_lm.config import validate
from tost_lm.errors import CheckpointError, DataError
from tost_lm.interop.authors import read_authors, to_authors
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.checkpoint import write_checkpoint

PROGRAM = "tost_lm.convert"
FILES = CHECKOUT / "../shared/data/gpt2_bpe"
needs_files = pytest.mark.skipif(not FILES.is_dir(), reason="GPT-2's encoder.json and vocab.bpe are not here")
SIZES = {"layers": 2, "heads": 2, "width": 8, "max_positions": 16}


class Tokenizer(NamedTuple):
    file_name: str = "tokenizer.tiktoken"
    model_bytes: bytes = b"a tokenizer"


def make_model(**settings: Any) -> TostLM:
    torch.manual_seed(0)
    model = TostLM(validate(ModelConfig, {**SIZES, "layer_scale": 1e-5, **settings}, "test"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def write_theirs(path: Path, model: TostLM) -> None:
    torch.save(to_authors(model.config, model.state_dict(), iterations=600000), path)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(16)[None] * 2000).logits


@needs_files
def test_a_ckpt_becomes_a_model_folder_that_writes_text_and_a_ckpt_again(tmp_path: Path):
    model = make_model(vocab_size=50304)
    write_theirs(tmp_path / "ckpt.pt", model)
    words = ["ckpt.pt", "convert.folder=models/tost", f"convert.gpt2={FILES}"]
    assert torch.equal(logits(tost_lm.load(tmp_path / "ckpt.pt")), logits(model))
    read, written = run(PROGRAM, *words, cwd=tmp_path).splitlines()
    assert read.startswith("ckpt.pt: 2 layers of token statistics, width 8, 2 heads, vocabulary 50,304, 16 positions; ")
    assert f"; {model.parameter_count():,} parameters without positions after 600,000 iterations" in read
    assert written == "written to models/tost: python -m tost_lm.generate models/tost"
    assert torch.equal(logits(tost_lm.load(tmp_path / "models/tost")), logits(model))
    assert tost_lm.load_tokenizer(tmp_path / "models/tost").encode("Hello world") == [15496, 995]
    run("tost_lm.generate", "models/tost", "Hello world", "sample.tokens=5", cwd=tmp_path)

    before = snapshot(tmp_path / "models")
    assert refusal(PROGRAM, *words, cwd=tmp_path) == "models/tost: exists already; give another convert.folder"
    assert snapshot(tmp_path / "models") == before
    back = ["models/tost", "convert.folder=back", "convert.to=authors"]
    written, about_tokens = run(PROGRAM, *back, cwd=tmp_path).splitlines()
    assert written.startswith("models/tost: written to back/ckpt.pt, ")
    assert about_tokens.startswith("its tokens are those of models/tost/tokenizer.tiktoken, ")
    assert os.listdir(tmp_path / "back") == ["ckpt.pt"]
    theirs = torch.load(tmp_path / "back/ckpt.pt", weights_only=True)
    for name, weight in torch.load(tmp_path / "ckpt.pt", weights_only=True)["model"].items():
        assert torch.equal(theirs["model"][name], weight), name


@needs_files
def test_gpt2_comes_with_its_own_tokenizer(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=0.3)).eval()
    theirs.save_pretrained(tmp_path / "gpt2")
    shutil.copy(FILES / "encoder.json", tmp_path / "gpt2/vocab.json")
    shutil.copy(FILES / "vocab.bpe", tmp_path / "gpt2/merges.txt")
    read, _ = run(PROGRAM, "gpt2", "convert.folder=models/gpt2", cwd=tmp_path).splitlines()
    assert read.startswith("gpt2: 2 layers of softmax attention, width 8, 2 heads, vocabulary 50,257, 16 positions; ")
    for folder in ("models/gpt2", "gpt2"):
        torch.testing.assert_close(logits(tost_lm.load(tmp_path / folder)), logits(theirs), rtol=0, atol=1e-5)
        assert tost_lm.load_tokenizer(tmp_path / folder).vocab_size == 50257
    said = refusal(PROGRAM, "models/gpt2", "convert.folder=back", "convert.to=authors", cwd=tmp_path)
    assert said == "model.gelu 'tanh': the released code has no such model, only 'exact'"


def test_a_run_of_ours_becomes_a_ckpt_of_its_step(workplace: Path):
    run("pretrain.train", "run.toml", "run.stop_step=4", cwd=workplace)
    run(PROGRAM, "runs/tiny", "convert.folder=theirs", "convert.to=authors", cwd=workplace)
    found = read_authors(workplace / "theirs/ckpt.pt")
    ours = tost_lm.load(workplace / "runs/tiny")
    assert tost_lm.load_tokenizer(workplace / "runs/tiny").vocab_size == 384
    assert (found.iterations, found.config.vocab_size) == (4, 384)
    assert all(torch.equal(found.weights[name], weight) for name, weight in ours.state_dict().items())


class Payload:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("was_run",)


def test_what_cannot_be_converted_is_one_line_and_leaves_nothing(tmp_path: Path):
    theirs = to_authors((model := make_model(vocab_size=50)).config, model.state_dict(), 0)
    torch.save(theirs, tmp_path / "small.pt")
    torch.save({**theirs, "config": Payload()}, tmp_path / "hostile.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    write_checkpoint(tmp_path / "ours", model.config, model.state_dict(), Tokenizer())
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')
    before = snapshot(tmp_path)
    problems = {
        "hostile.pt": "refused: reading it would run posix.mkdir, which no weights need; nothing of it was run",
        "text.pt": "damaged, or not a file of torch.save: copy it again",
        "ours": "neither a ckpt.pt nor a folder with GPT-2's config.json; for a model of ours give convert.to=authors",
        "nowhere": "neither a ckpt.pt nor a folder with GPT-2's config.json",
        "llama/config.json": "model_type is 'llama', and only 'gpt2' is understood",
    }
    for source, problem in problems.items():
        path = source.removesuffix("/config.json")
        assert refusal(PROGRAM, path, "convert.folder=models/new", cwd=tmp_path) == f"{source}: {problem}"
    words = ["small.pt", "convert.folder=models/new", "convert.gpt2=nowhere"]
    assert refusal(PROGRAM, *words, cwd=tmp_path).startswith("convert.gpt2 nowhere: encoder.json cannot be read: ")
    with pytest.raises(CheckpointError, match=r"hostile\.pt: refused"):
        tost_lm.load(tmp_path / "hostile.pt")
    with pytest.raises(DataError, match=r"small\.pt: holds no tokenizer; python -m tost_lm.convert "):
        tost_lm.load_tokenizer(tmp_path / "small.pt")
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        tost_lm.load_tokenizer(tmp_path / "nowhere")
    said = refusal(PROGRAM, "ours", "convert.folder=small.pt/x", "convert.to=authors", cwd=tmp_path)
    assert said == "small.pt/x: cannot be written: Not a directory"
    said = refusal(PROGRAM, "ours", "convert.folder=x", "convert.to=authors", "convert.gpt2=y", cwd=tmp_path)
    assert said == "command line: convert.gpt2: a ckpt.pt holds no tokenizer; leave it out"
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "was_run").exists()


def test_settings_are_printed_and_help_given_without_torch(tmp_path: Path):
    script = (
        "import runpy, sys\nsys.argv = ['program', *sys.argv[1:]]\ntry:\n"
        f"    runpy.run_module({PROGRAM!r}, run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0\nassert 'torch' not in sys.modules"
    )
    for words, said in (
        (["--help"], f"usage: python -m {PROGRAM} "),
        (["a.pt", "convert.folder=x", "--dry-run"], 'to = "'),
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, *words], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
