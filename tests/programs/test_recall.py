"""Recall as a user measures it: a table; a model that was trained is kept when the next one is stopped."""

import json
from pathlib import Path

from programs import interrupt, refusal, run, snapshot

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
sequence_tokens = 8
vocab_size = 16
examples = 40
[optim]
lr = 0.01
min_lr = 0.001
[train]
steps = 30
batch_examples = 2
"""


def test_what_was_trained_is_kept_when_it_is_stopped_and_not_trained_again(tmp_path: Path):
    (tmp_path / "mqar.toml").write_text(TINY)
    stored = tmp_path / "runs/mqar/eval/mqar@zoology/results.json"
    words = ["eval.recall", "mqar.toml", 'recall.patterns=["A", "T"]']
    thousands = [f"recall.seeds={list(range(5000))}"]
    code, errors = interrupt(*words, *thousands, cwd=tmp_path, when=stored.exists)
    assert code == 130
    assert "Traceback" not in errors
    kept = json.loads(stored.read_text())["results"]
    assert [result["identity"]["seed"] for result in kept] == list(range(len(kept)))

    said = run(*words, "recall.seeds=[0]", cwd=tmp_path)
    assert "training T, seed 0" in said
    assert "training A" not in said
    assert "A, seed 0:" in said
    assert "| AA | " in said
    assert "| TT | " in said
    assert json.loads(stored.read_text())["results"][:-1] == kept


def test_a_mistake_is_one_line_and_trains_nothing(tmp_path: Path):
    (tmp_path / "mqar.toml").write_text(TINY)
    before = snapshot(tmp_path)
    said = refusal("eval.recall", "mqar.toml", "mqar.pairs=3", cwd=tmp_path)
    assert (
        said
        == "mqar.toml: mqar.pairs: 3 need mqar.sequence_tokens of 12 or more, two for each pair and two for its query"
    )
    assert snapshot(tmp_path) == before
