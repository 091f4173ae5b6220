"""Model folders: what is written is read back, and anything else is refused by name."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hf_tokenizers import byte_level, made
from safetensors import safe_open

import tost_lm
from tost_lm.checkpointing.format import Progress, read_model_config, write_checkpoint
from tost_lm.checkpointing.run_folder import find_checkpoint
from tost_lm.config import validate
from tost_lm.errors import CheckpointError, TostError
from tost_lm.model import ModelConfig, TostLM

pytestmark = pytest.mark.quick

CONFIG = validate(
    ModelConfig, {"layers": 1, "heads": 2, "width": 8, "vocab_size": 11, "max_positions": 6, "layer_scale": 1.0}, "test"
)


def write(folder: Path, seed: int = 0, files: Mapping[str, bytes] = {}) -> TostLM:
    torch.manual_seed(seed)
    model = TostLM(CONFIG)

    def write_files(temp: Path) -> None:
        for name, content in files.items():
            (temp / name).write_bytes(content)

    write_checkpoint(folder, CONFIG, model.state_dict(), made(byte_level()), write_files)
    return model


def run_folder(tmp_path: Path) -> Path:
    for step in (5, 10, 15):
        write(tmp_path / "run" / "checkpoints" / f"step_{step:08d}", seed=step)
    return tmp_path / "run"


def test_a_loaded_model_computes_the_same_bits(tmp_path: Path):
    model = write(tmp_path / "export")
    tokens = torch.randint(11, (2, 6))
    assert torch.equal(tost_lm.load(tmp_path / "export")(tokens).logits, model(tokens).logits)


def test_a_run_folder_stands_for_its_newest_checkpoint_and_not_for_an_interrupted_save(tmp_path: Path):
    run = run_folder(tmp_path)
    (run / "checkpoints" / ".step_00000020.tmp").mkdir()
    assert find_checkpoint(run).name == "step_00000015"


def test_the_shards_are_what_hugging_face_reads(tmp_path: Path):
    model = write(tmp_path / "export")
    index = json.loads((tmp_path / "export/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in model.parameters())
    assert index["weight_map"].keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        with safe_open(tmp_path / "export" / index["weight_map"][name], framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert torch.equal(file.get_tensor(name), weight)


def test_whoever_may_read_the_folder_may_read_the_weights(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "export")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "export").iterdir()} == {"0o640"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"format": "tost_lm.checkpoint.v1", "sha256": {}}, r"format: Input should be 'tost_lm\.checkpoint\.v2'"),
        ([], "Invalid JSON"),
        ({"files": ["model.safetensors"]}, r"files: Input should be"),
        ({"files": {"model.safetensors": 7}}, r"files\.model\.safetensors: "),
        ({"files": {"model.safetensors": {"bytes": -1, "xxh3": "0" * 32}}}, r"model\.safetensors\.bytes"),
        ({"files": {"model.safetensors": {"bytes": 10**30, "xxh3": "0" * 32}}}, r"model\.safetensors\.bytes"),
        ({"files": {"model.safetensors": {"bytes": 1}}}, r"model\.safetensors\.xxh3: Field required"),
        ({"files": {"../model.json": {"bytes": 1, "xxh3": "0" * 32}}}, r"model\.json.*: String should match"),
        ({"files": {"a\n\u001b[2J": {"bytes": 1, "xxh3": "0" * 32}}}, r"String should match"),
        (b'{"format": "\xff"', "Invalid JSON"),
        (b'{"files": ' + b"[" * 100_000, "Invalid JSON: recursion"),
    ],
)
def test_a_crafted_manifest_is_refused_in_one_line(tmp_path: Path, content: Any, problem: str):
    write(tmp_path / "export")
    path = tmp_path / "export/manifest.json"
    if isinstance(content, dict):
        content = {"format": "tost_lm.checkpoint.v2", **content}
    body = (content if isinstance(content, bytes) else json.dumps(content).encode()).removesuffix(b"}")
    path.write_bytes(body + f',\n "xxh3": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode())
    with pytest.raises(CheckpointError, match=problem) as caught:
        tost_lm.load(tmp_path / "export")
    assert str(caught.value).startswith(f"{path}: not tost_lm.checkpoint.v2 (")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("content", [b"[]", b"\xff", b'{"layers": ' + b"[" * 100_000, b'{"layers": "two"}'])
@pytest.mark.parametrize(("name", "read"), [("model.json", read_model_config), ("training.json", Progress.read)])
def test_crafted_settings_and_progress_are_refused_in_one_line(
    tmp_path: Path, name: str, read: Callable[[Path], object], content: bytes
):
    """Files with the hashes in the manifest."""
    write(tmp_path / "export", files={name: content})
    with pytest.raises(TostError) as caught:
        read(tmp_path / "export")
    assert name in str(caught.value)
    assert all(line.isprintable() for line in str(caught.value).splitlines())


@pytest.mark.parametrize(
    "changed", [{"width": 16}, {"layers": 2}, {"layers": 9999}, {"vocab_size": 1 << 40}, {"vocab_size": 10**20}]
)
def test_settings_of_other_weights_are_refused_before_they_are_allocated(tmp_path: Path, changed: dict[str, int]):
    """In a file with the hash in the manifest."""
    settings = json.dumps(CONFIG.model_dump() | changed).encode()
    write(tmp_path / "export", files={"model.json": settings})
    with pytest.raises(CheckpointError, match=r"export: its settings are not those of its weights; delete the checkpo"):
        tost_lm.load(tmp_path / "export")


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
