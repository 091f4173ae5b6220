"""The benchmarks, small: processes of their own, and one table."""

import json
from pathlib import Path

import pytest

from benchmarks import generation, long, loss, model, operator, training
from tost_lm.config import validate

BENCH = {"device": "cpu"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "benchmarks/results"


def test_the_operator_and_its_rivals(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling is torch's affair, and most of a minute
    tree = {"shape": {"heads": 2, "channels": 8}, "bench": {**BENCH, "lengths": [4096]}}
    operator.main(None, validate(operator.OperatorBenchmarkConfig, tree, "test"))
    (path,) = folder.glob("operator_*.json")
    copy, *cells = json.loads(path.read_text())["cells"]
    assert copy["bytes_per_second"] > 1e8
    assert [(cell["work"], cell["rival"]) for cell in cells] == [
        (work, rival) for work in ("forward", "forward + backward") for rival in operator.RIVALS
    ]
    assert all(len(cell["seconds"]) == 7 and min(cell["seconds"]) > 0 for cell in cells)
    assert all(cell["w_bytes"] == 4096 * 16 * 4 for cell in cells)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2
    assert "× time" in table[-1]
    assert "\n".join(table) in path.with_suffix(".md").read_text()


def test_the_model_and_its_rivals(folder: Path, capsys: pytest.CaptureFixture):
    tree = {"shape": {"layers": 1, "width": 8, "heads": 2}, "bench": {**BENCH, "lengths": [64]}}
    model.main(None, validate(model.ModelBenchmarkConfig, tree, "test"))
    (path,) = folder.glob("model_*.json")
    cells = json.loads(path.read_text())["cells"]
    assert [(cell["work"], cell["rival"]) for cell in cells] == [
        (work, rival) for work in ("training step", "decoding a token") for rival in model.RIVALS
    ]
    assert all(len(cell["seconds"]) == 7 and min(cell["seconds"]) > 0 for cell in cells)
    tost, *gpt2 = (cell["state_bytes"] for cell in cells[3:])
    assert tost < 4 * 64
    assert gpt2 == [64 * 2 * 8 * 4] * 2
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2
    assert "\n".join(table) in path.with_suffix(".md").read_text()


def test_the_training_step_and_the_engine(folder: Path, capsys: pytest.CaptureFixture):
    shape = {"layers": 1, "heads": 2, "width": 16, "vocab_size": 384, "tokens": 64}
    shapes = dict.fromkeys(("small", "long", "large", "bound"), shape)
    tree = {**shapes, "bench": {**BENCH, "rounds": 3, "engine_steps": 12}}
    training.main(None, validate(training.TrainingBenchmarkConfig, tree, "test"))
    (path,) = folder.glob("training_*.json")
    *steps, engine = json.loads(path.read_text())["cells"]
    for cell in steps:
        assert {name: len(seconds) for name, seconds in cell["seconds"].items()} == dict.fromkeys(
            (
                training.OURS, training.COMPILED, training.LOOP, training.PLAIN, training.PLAIN_COMPILED,
                training.WITHOUT,
            ),
            3,
        )  # fmt: skip
    assert len(engine["save_seconds"]) == 4
    assert len(engine["step_seconds"]) + len(engine["steps_while_writing"]) == 12 - 3 - 1
    assert engine["checkpoint_bytes"] > 12 * (384 + 64) * 16
    assert "## The engine" in capsys.readouterr().out


def test_tiles_beside_whole_rows(folder: Path, capsys: pytest.CaptureFixture):
    shape = {"layers": 1, "heads": 2, "width": 16, "vocab_size": 64}
    bench = {**BENCH, "lengths": [64, 256, 512], "tile_tokens": 32, "rounds": 2, "turn_tokens": 256}
    long.main(None, validate(long.LongBenchmarkConfig, {"shape": shape, "bench": bench}, "test"))
    (path,) = folder.glob("long_*.json")
    *cells, turns = json.loads(path.read_text())["cells"]
    assert [(cell["tokens"], cell["rival"]) for cell in cells] == [
        (tokens, rival) for tokens in (64, 256, 512) for rival in (long.TILES, long.WHOLE)
    ]
    assert all(cell["seconds"] > 0 and cell["peak_bytes"] > 1e8 for cell in cells)
    assert {length: len(seconds) for length, seconds in turns["turns"]["seconds"].items()} == {"64": 2, "256": 2}
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3
    assert "\n".join(table) in path.with_suffix(".md").read_text()


def test_the_loss_and_its_rivals(folder: Path, capsys: pytest.CaptureFixture):
    tree = {"shape": {"width": 8, "vocab_size": 64}, "bench": {**BENCH, "lengths": [128]}}
    loss.main(None, validate(loss.LossBenchmarkConfig, tree, "test"))
    (path,) = folder.glob("loss_*.json")
    cells = json.loads(path.read_text())["cells"]
    assert [cell["rival"] for cell in cells] == list(loss.RIVALS)
    assert all(len(cell["seconds"]) == 7 and min(cell["seconds"]) > 0 for cell in cells)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 1


def test_generation_and_its_rival(folder: Path, capsys: pytest.CaptureFixture):
    shape = {"layers": 1, "heads": 2, "width": 16, "vocab_size": 64}
    tree = {"shape": shape, "bench": {"device": "cpu", "tokens": 64, "lengths": 4}}
    generation.main(None, validate(generation.GenerationBenchmarkConfig, tree, "test"))
    (path,) = folder.glob("generation_*.json")
    together, alone = json.loads(path.read_text())["cells"]
    assert (
        list(together["seconds"])
        == list(together["prefix_seconds"])
        == list(alone["extra_bytes"])
        == ["1", "16", "32", "48", "64"]
    )
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 4
    assert "\n".join(table) in path.with_suffix(".md").read_text()
