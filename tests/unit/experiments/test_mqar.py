"""Multi-query associative recall: well-formed, repeatable examples with the right distribution, and stored results."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.mqar import (
    TESTING,
    TRAINING,
    MqarConfig,
    RecallConfig,
    draw_examples,
    draw_model,
    evaluate,
    loss_of_examples,
    measure,
    recall_table,
    slot_weights,
    train,
)
from tost_lm.config import validate
from tost_lm.errors import ConfigError, TrainingError
from tost_lm.model import TostLM
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.testing import FLOAT32_REORDERED

pytestmark = pytest.mark.quick

TINY = {
    "model": {"layers": 2, "heads": 2, "width": 16, "vocab_size": 16, "max_positions": 8, "layer_scale": 0.0},
    "mqar": {"pairs": 2, "seq_len": 8, "vocab_size": 16, "examples": 40},
    "optim": {"lr": 0.01, "min_lr": 0.001, "warmup_steps": 2},
    "train": {"steps": 3, "batch_size": 16},
}


def mqar(**values: Any) -> MqarConfig:
    return validate(MqarConfig, values, "test")


def recall(**sections: dict[str, Any]) -> RecallConfig:
    tree = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {**TINY, **sections}}
    return validate(RecallConfig, tree, "test")


@given(
    pairs=st.integers(1, 12),
    tokens=st.integers(4, 80),
    half=st.integers(1, 40),
    power=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=60, deadline=None)
def test_every_example_is_well_formed(pairs: int, tokens: int, half: int, power: float, seed: int):
    assume(4 * pairs <= tokens and pairs <= half)
    config = mqar(pairs=pairs, seq_len=tokens, vocab_size=2 * half, power=power, seed=seed)
    drawn = draw_examples(config, 5, TESTING)
    assert drawn.tokens.shape == drawn.labels.shape == (5, tokens)
    assert drawn.tokens.dtype == drawn.labels.dtype == np.int64
    assert drawn.tokens.min() >= 0
    assert drawn.tokens.max() < 2 * half
    for row, labels in zip(drawn.tokens, drawn.labels, strict=True):
        keys, values = row[: 2 * pairs : 2], row[1 : 2 * pairs : 2]
        queries = np.flatnonzero(labels != IGNORED_LABEL)
        assert len(set(keys)) == pairs
        assert keys.max() < half <= values.min()
        assert sorted(row[queries]) == sorted(keys)  # one query per key
        assert dict(zip(row[queries], labels[queries], strict=True)) == dict(zip(keys, values, strict=True))
        assert all(queries >= 2 * pairs)
        assert all(queries % 2 == 0)
        assert np.isin(row, keys).sum() == 2 * pairs  # and no other occurrence


def test_first_draws_of_slots_follow_the_power_law():
    config = mqar(pairs=1, seq_len=42, power=0.3)
    drawn = draw_examples(config, 40_000, TRAINING)
    slots = (drawn.labels != IGNORED_LABEL).argmax(1) // 2 - 1
    counts = np.bincount(slots, minlength=20)
    expected = 40_000 * slot_weights(config)
    assert expected == pytest.approx(40_000 * np.arange(1, 21) ** -0.7 / (np.arange(1, 21) ** -0.7).sum())
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_noise_is_any_token_except_the_keys():
    config = mqar(pairs=2, seq_len=40, vocab_size=10)
    drawn = draw_examples(config, 20_000, TRAINING)
    noise = drawn.tokens[:, 5:][drawn.labels[:, 4:-1] != IGNORED_LABEL]  # the token after each query
    counts = np.bincount(noise, minlength=10)
    # Each id of the lower half is a key, and no noise, in 2 of 5 examples.
    assert counts[:5] / len(noise) == pytest.approx(3 / 5 / 8, abs=0.01)
    assert counts[5:] / len(noise) == pytest.approx(1 / 8, abs=0.01)


def test_examples_repeat_and_depend_on_seed_and_stream():
    first, again = (draw_examples(mqar(seed=3), 50, TRAINING, 0, 7) for _ in range(2))
    np.testing.assert_equal(first, again)
    for config, stream in (
        (mqar(seed=4), (TRAINING, 0, 7)),
        (mqar(seed=3), (TRAINING, 0, 8)),
        (mqar(seed=3), (TESTING,)),
    ):
        other = draw_examples(config, 50, *stream).tokens
        assert not (first.tokens[:, None] == other[None]).all(-1).any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 33}, "mqar.vocab_size: 33 is odd; set an even size"),
        ({"pairs": 4, "vocab_size": 6}, "mqar.pairs: 4 distinct keys do not fit; set mqar.vocab_size to 8 or more"),
        ({"pairs": 4, "seq_len": 15}, "mqar.pairs: 4 pairs do not fit; set mqar.seq_len to 16 or more"),
        ({"power": -0.5}, "power: input should be greater than or equal to 0"),
    ],
)
def test_impossible_examples_are_rejected(values: dict, message: str):
    with pytest.raises(ConfigError, match=message) as error:
        mqar(**values)
    assert "\n" not in str(error.value)


def test_training_draws_new_examples_each_step_and_no_held_out_ones():
    config = recall()
    seen: list[bytes] = []
    for seed in (0, 1):
        model = draw_model(config.model, seed)
        model.register_forward_pre_hook(lambda _, call: seen.extend(row.numpy().tobytes() for row in call[0]))
        train(model, config.optim, 3, loss_of_examples(model, config.mqar, 16, seed))
    held_out = {row.tobytes() for row in draw_examples(config.mqar, config.mqar.examples, TESTING).tokens}
    assert len(seen) == len(set(seen)) == 2 * 3 * 16
    assert not held_out & set(seen)


def test_scores_equal_those_of_the_logits_in_any_batch():
    config = recall(mqar={"pairs": 1, "examples": 7})
    torch.manual_seed(1)
    model = TostLM(config.model).double().eval()
    drawn = draw_examples(config.mqar, 7, TESTING)
    places = (drawn.labels != IGNORED_LABEL).argmax(1)
    answers = torch.from_numpy(drawn.labels[range(7), places])
    with torch.inference_mode():
        log_probs = torch.log_softmax(model(torch.from_numpy(drawn.tokens)).logits, -1)[range(7), places]
    scores = evaluate(model, config.mqar, 3)
    assert scores == pytest.approx(evaluate(model, config.mqar, 7))
    right = (log_probs.argmax(-1) == answers).double()
    assert scores["accuracy"] == pytest.approx(right.mean().item())
    assert scores["accuracy_standard_error"] == pytest.approx(right.std().item() / 7**0.5)
    assert scores["nats"] == pytest.approx(-log_probs[range(7), answers].mean().item(), rel=FLOAT32_REORDERED)
    assert scores["queries"] == 7


def test_results_are_stored_one_by_one_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    stored = Path("runs/mqar/eval/mqar@zoology/results.json")
    alone = measure(recall(recall={"patterns": ["TA"], "seeds": [5]}))
    both = recall(recall={"patterns": ["A", "TA"], "seeds": [5, 6]})
    capsys.readouterr()
    results = measure(both)
    output = capsys.readouterr().out
    assert [(r["identity"]["pattern"], r["identity"]["seed"]) for r in results] == [
        ("A", 5), ("A", 6), ("TA", 5), ("TA", 6)
    ]  # fmt: skip
    assert results[2] == alone[0]
    assert output.count("training ") == 3
    before = stored.read_bytes()
    assert measure(both) == results
    assert stored.read_bytes() == before
    measure(recall(recall={"patterns": ["A"], "seeds": [5]}, optim={"lr": 0.02}))  # adds a result
    kept = json.loads(stored.read_text())["results"]
    assert len(kept) == 5
    assert all(result in kept for result in results)
    stored.write_text(stored.read_text().replace('"accuracy": ', '"accuracy": 1'))
    with pytest.raises(ConfigError, match=r"mqar@zoology/results\.json: damaged or edited"):
        measure(both)
    table = recall_table(results).splitlines()
    assert [line.split(" | ")[0] for line in table[2:4]] == ["| AA", "| TA"]
    assert "Guessing: 12.50% of all values, 50.0% of the example's own" in table[-1]


def test_a_diverging_training_is_an_error_and_keeps_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    good = recall(recall={"patterns": ["A"]})
    results = measure(good)
    with pytest.raises(TrainingError, match=r"the loss is nan after \d steps; lower the learning rate"):
        measure(recall(recall={"patterns": ["A"]}, optim={"lr": 1e30, "grad_clip": 0.0, "warmup_steps": 0}))
    assert measure(good) == results
