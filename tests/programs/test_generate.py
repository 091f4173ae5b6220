"""`tost generate` as a user runs it: empty prompts, prompts that look like settings, and errors."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import ENVIRONMENT, Forked
from programs import run
from test_wheel import write_model

import tost_lm
from tost_lm import progress
from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.cli import generate
from tost_lm.config import validate
from tost_lm.inference.generation import generate_text
from tost_lm.inference.settings import GenerateConfig
from tost_lm.model import streaming

PROGRAM = "tost generate"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("prompt", ["", "The lines"])
def test_output_is_the_prompt_and_the_generated_text(folder: Path, prompt: str):
    model, tokenizer = tost_lm.load(folder / "model"), tost_lm.load_tokenizer(folder / "model")
    text = "".join(generate_text(model, tokenizer, prompt, 5))
    output = run(PROGRAM, "model", prompt, "sample.tokens=5", cwd=folder)
    assert output.startswith(f"{prompt}{text}\nstate after the prompt of {1 + len(tokenizer.encode(prompt))} tokens: ")


@pytest.mark.slow
def test_a_terminal_gets_no_control_characters_of_the_prompt(folder: Path):
    reader, terminal = pty.openpty()
    prompt = "a\x1b]0;b\x07\tc\r\x9bd"
    command = [sys.executable, "-m", "tost_lm.cli.main", "generate", "model", prompt, "sample.tokens=1"]
    for _ in range(2):  # generated, and printed again
        subprocess.run(command, cwd=folder, env=ENVIRONMENT, stdout=terminal, check=True)
        shown = os.read(reader, 10_000).decode()
        assert r"a\x1b]0;b\x07" + "\t" + r"c\x0d\x9bd" in shown
        assert "\x1b]" not in shown
        assert not {"\x07", "\x9b"} & {*shown}
    assert json.loads((folder / "model/eval/sample/results.json").read_text())["prompt"] == prompt


def test_weights_that_are_not_finite_are_an_error_on_a_line_of_its_own(folder: Path):
    model = tost_lm.load(folder / "model")
    model.norm.weight.data[3] = torch.nan
    write_checkpoint(folder / "nan", model.config, model.state_dict(), tost_lm.load_tokenizer(folder / "model"))
    code, out, err = Forked(PROGRAM, "nan", "hello", cwd=folder).finish()
    assert (code, out) == (2, "hello\n"), err
    assert err == "error: nan: its logits are not finite (NaN or infinite); use an earlier checkpoint\n"
    assert not (folder / "nan/eval/sample/results.json").exists()


def test_a_prompt_that_takes_long_to_read_has_progress(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(streaming, "TILE_TOKENS", 16)
    monkeypatch.chdir(folder)
    tokens = 1 + len(tost_lm.load_tokenizer("model").encode("a" * 60))
    generate.main(Path("model"), validate(GenerateConfig, {"sample": {"prompt": "a" * 60, "tokens": 1}}, "test"))
    lines = capsys.readouterr().err.splitlines()
    read = [line.partition(" tokens, ")[0] for line in lines]
    assert read == [f"reading the prompt: {before}" for before in range(16, tokens, 16)]


def test_too_many_tokens_are_an_error_before_any_output(folder: Path):
    code, out, err = Forked(PROGRAM, "model", "hello", "sample.tokens=2000", cwd=folder).finish()
    assert (code, out) == (2, "")
    assert "2000 new tokens exceed the model's 1024 positions; shorten sample.prompt or lower sample.tokens\n" in err
