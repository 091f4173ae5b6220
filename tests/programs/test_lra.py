"""`tost eval lra` as a user runs it: plan and table, an interruption that keeps the results so far, and mistakes."""

import json
from pathlib import Path

from programs import interrupt, refusal, run, snapshot

TINY = """
[data]
max_tokens = 20
[listops]
min_length = 4
max_length = 20
train = 30
valid = 4
test = 6
[model]
layers = 1
heads = 2
width = 8
[optim]
min_lr = 0.0
[train]
steps = 3
batch_size = 4
[pretraining]
steps = 2
[lra]
mixers = ["T", "S", "A", "C", "N"]
learning_rates = [1e-3]
"""


def test_results_of_trained_models_remain_after_an_interruption(tmp_path: Path):
    (tmp_path / "lra.toml").write_text(TINY)
    stored = tmp_path / "runs/lra/eval/listops@lra/results.json"
    code, errors = interrupt(
        "tost eval lra", "lra.toml", f"lra.seeds={list(range(5000))}", cwd=tmp_path, when=stored.exists
    )
    assert code == 130
    assert "Traceback" not in errors
    kept = json.loads(stored.read_text())["results"]
    files = snapshot(tmp_path / "data")

    output = run("tost eval lra", "lra.toml", "lra.seeds=[0]", cwd=tmp_path)
    assert snapshot(tmp_path / "data") == files
    assert "listops: 30 / 4 / 6 examples" in output
    assert "training T, learning rate 0.001, seed 0" not in output
    assert "pretraining S, seed 0" in output
    assert json.loads(stored.read_text())["results"][: len(kept)] == kept
    rows = [line.split(" | ")[:2] for line in output.splitlines() if line.startswith("| ") and " 0.001 " in line]
    assert rows == [[f"| {mixer}", pretrained] for mixer in "TSACN" for pretrained in ("no", "yes")]


def test_a_mistake_is_one_line_and_trains_nothing(tmp_path: Path):
    (tmp_path / "lra.toml").write_text(TINY)
    before = snapshot(tmp_path)
    output = refusal("tost eval lra", "lra.toml", "data.task=text", cwd=tmp_path)
    assert (
        output
        == "data/lra/text/train/neg: fewer than two texts (*.txt); set data.folder to the unpacked folder aclImdb"
    )
    assert snapshot(tmp_path) == before
