"""Model folders: what is written is read back, and anything else is refused by name."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import tost_lm
from tost_lm.config import validate
from tost_lm.errors import CheckpointError
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.checkpoint import find_checkpoint, write_checkpoint

CONFIG = validate(
    ModelConfig, {"layers": 1, "heads": 2, "width": 8, "vocab_size": 11, "max_positions": 6, "layer_scale": 1.0}, "test"
)


class Tokenizer(NamedTuple):
    file_name: str
    model_bytes: bytes


def write(folder: Path, seed: int = 0) -> TostLM:
    torch.manual_seed(seed)
    model = TostLM(CONFIG)
    write_checkpoint(folder, CONFIG, model.state_dict(), Tokenizer("tokenizer.tiktoken", b"a tokenizer"))
    return model


def run_folder(tmp_path: Path) -> Path:
    for step in (5, 10, 15):
        write(tmp_path / "run" / "checkpoints" / f"step_{step:08d}", seed=step)
    return tmp_path / "run"


def test_a_loaded_model_computes_the_same_bits(tmp_path: Path):
    model = write(tmp_path / "export")
    tokens = torch.randint(11, (2, 6))
    assert torch.equal(tost_lm.load(tmp_path / "export")(tokens).logits, model(tokens).logits)


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path):
    assert find_checkpoint(run_folder(tmp_path)).name == "step_00000015"


def test_a_folder_left_by_an_interrupted_save_is_not_a_checkpoint(tmp_path: Path):
    run = run_folder(tmp_path)
    (run / "checkpoints" / ".step_00000020.tmp").mkdir()
    assert find_checkpoint(run).name == "step_00000015"


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "tokenizer.tiktoken", "manifest.json"])
def test_one_flipped_bit_is_noticed_and_the_checkpoint_before_is_taken(tmp_path: Path, name: str):
    run = run_folder(tmp_path)
    damaged = run / "checkpoints" / "step_00000015" / name
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    said: list[str] = []
    assert find_checkpoint(run, said.append).name == "step_00000010"
    assert len(said) == 1
    assert "step_00000015" in said[0]
    with pytest.raises(CheckpointError, match=r"step_00000015"):
        tost_lm.load(damaged.parent)


def test_what_is_no_checkpoint_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no such folder"):
        tost_lm.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"not a checkpoint: it holds no checkpoint"):
        tost_lm.load(tmp_path)
    run = run_folder(tmp_path)
    for step in (run / "checkpoints").iterdir():
        (step / "model.json").unlink()
    with pytest.raises(CheckpointError, match="none of its checkpoints is valid"):
        find_checkpoint(run, lambda line: None)
