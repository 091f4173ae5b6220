"""`tost convert` as a user runs it: refused sources, and what a converted model is good for."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hf_tokenizers import byte_level, made
from programs import refusal, refusal_here, run, snapshot
from public_models import write_olmo_hybrid

import tost_lm
from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import validate
from tost_lm.data.tokenizers import find_tokenizer, read_tokenizer
from tost_lm.errors import CheckpointError, DataError
from tost_lm.model import ModelConfig, TostLM

PROGRAM = "tost convert"


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.touch, (self.target,)


@pytest.mark.quick
def test_a_pickle_is_refused_in_one_line_and_never_run(tmp_path: Path):
    for name in ("ckpt.pt", "pytorch_model.bin"):
        torch.save({"model": Payload(tmp_path / "was_run")}, tmp_path / name)
        problem = f"{name}: a file, which is not read because pickles run code; give a "
        for words in (("tost eval", name, "heldout"), ("tost generate", name, "text")):
            assert refusal_here(*words, cwd=tmp_path).startswith(problem)
        printed = refusal_here(PROGRAM, name, "convert.folder=new", cwd=tmp_path)
        assert printed == f"{name}: no folder of the Hugging Face library, with config.json; give one"
        with pytest.raises(CheckpointError, match=problem):
            tost_lm.load(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt.pt", "pytorch_model.bin"}
    pickle.loads(pickle.dumps(Payload(tmp_path / "was_run")))  # shows that the payload works
    assert (tmp_path / "was_run").exists()


def test_weights_alone_are_no_branch(workplace: Path):
    run("tost train", "run.toml", "train.steps=2", cwd=workplace)
    model = tost_lm.load(step := workplace / "runs/tiny/checkpoints/step_00000002")
    write_checkpoint(workplace / "weights", model.config, model.state_dict(), read_tokenizer(find_tokenizer(step)))
    words = ["run.toml", "train.steps=2", "run.name=new", "train.branch_from=weights"]
    printed = refusal("tost train", *words, cwd=workplace)
    assert printed.startswith("train.branch_from weights: has no optimizer state of a run; set train.initial_weights")


def test_refused_sources_are_one_line_and_leave_nothing(tmp_path: Path):
    model = TostLM(validate(ModelConfig, {"layers": 2, "heads": 2, "width": 8, "vocab_size": 400}, "test"))
    write_checkpoint(tmp_path / "ours", model.config, model.state_dict(), made(byte_level()))
    write_olmo_hybrid(tmp_path / "small")
    shutil.copytree(tmp_path / "small", tmp_path / "whole")
    (tmp_path / "small/tokenizer.json").unlink()
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts/config.json").write_text('{"model_type": "qwen3_5_moe"}')
    before = snapshot(tmp_path)
    neither = "no folder of the Hugging Face library, with config.json; give one"
    problems = {
        "ours": f"{neither} or, for a model folder, another convert.to",
        "nowhere": neither,
        "experts/config.json": "unsupported model_type: 'qwen3_5_moe' (Qwen3.5 with experts); train it with "
        "ms-swift or Megatron-Bridge",
    }
    for source, problem in problems.items():
        path = source.removesuffix("/config.json")
        assert refusal_here(PROGRAM, path, "convert.folder=models/new", cwd=tmp_path) == f"{source}: {problem}"
    words = ["small", "convert.folder=models/new"]
    assert refusal_here(PROGRAM, *words, cwd=tmp_path) == "small: no tokenizer.json; add that of the model"
    assert refusal_here(PROGRAM, "small", "convert.folder=ours", cwd=tmp_path).startswith(
        "ours: exists already; give anoth"
    )
    with pytest.raises(DataError, match=r"small: no tokenizer\.json; add that of the model"):
        tost_lm.load_tokenizer(tmp_path / "small")
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        tost_lm.load_tokenizer(tmp_path / "nowhere")
    printed = refusal_here(PROGRAM, "whole", "convert.folder=small/config.json/x", cwd=tmp_path)
    assert printed == "small/config.json/x: cannot be written: Not a directory"
    printed = refusal_here(PROGRAM, "whole", "convert.folder=x", "convert.like=y", cwd=tmp_path)
    assert printed.endswith("convert.like y: only for forms of the Hugging Face library; set convert.to")
    assert snapshot(tmp_path) == before
