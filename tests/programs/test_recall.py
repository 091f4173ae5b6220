"""`experiments.mqar` as a user runs it: a table, and an interruption that keeps the results so far."""

import json
from pathlib import Path

import pytest
from programs import interrupt, run

TINY = """
[model]
layers = 2
heads = 2
width = 16
vocab_size = 16
max_positions = 8
layer_scale = 0.0
[mqar]
pairs = 2
seq_len = 8
vocab_size = 16
examples = 40
[optim]
lr = 0.01
min_lr = 0.001
[train]
steps = 30
batch_size = 2
"""


@pytest.mark.slow
def test_results_of_trained_models_remain_after_an_interruption(tmp_path: Path):
    (tmp_path / "mqar.toml").write_text(TINY)
    stored = tmp_path / "runs/mqar/eval/mqar@zoology/results.json"
    words = ["experiments.mqar", "mqar.toml", 'recall.patterns=["A", "T"]']
    thousands = [f"recall.seeds={list(range(5000))}"]
    code, errors = interrupt(*words, *thousands, cwd=tmp_path, when=stored.exists)
    assert code == 130
    assert "Traceback" not in errors
    kept = json.loads(stored.read_text())["results"]
    assert [result["identity"]["seed"] for result in kept] == list(range(len(kept)))

    output = run(*words, "recall.seeds=[0]", cwd=tmp_path)
    assert "training T, seed 0" in output
    assert "training A" not in output
    assert "A, seed 0:" in output
    assert "| AA | " in output
    assert "| TT | " in output
    assert json.loads(stored.read_text())["results"][:-1] == kept
