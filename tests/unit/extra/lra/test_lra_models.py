"""Models of the Long-Range Arena: equal parameters, choice of the learning rate, self-pretraining, stored results."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.extra.encoder.model import Encoder
from tost_lm.extra.encoder.settings import EncoderConfig
from tost_lm.extra.lra import experiment
from tost_lm.extra.lra.experiment import Variant, encoder_config, measure, plan, pretrain
from tost_lm.extra.lra.settings import LraConfig, LraPretrainConfig
from tost_lm.extra.lra.tables import plan_table, results_table
from tost_lm.extra.lra.tasks import Split, Task
from tost_lm.optim.settings import OptimConfig

TINY: dict[str, Any] = {
    "data": {"max_tokens": 12},
    "model": {"layers": 2, "heads": 2, "width": 16},
    "optim": {"min_lr": 0.0, "weight_decay": 0.0},
    "train": {"steps": 4, "batch_size": 8},
    "pretraining": {"steps": 3},
    "lra": {"mixers": ["S", "N"], "learning_rates": [1e-3, 1e-2], "seeds": [0, 1], "pretraining": [False]},
}
ALL_MIXERS = ["T", "S", "A", "SA", "TA", "C", "N"]


def config_of(**sections: dict[str, Any]) -> LraConfig:
    return validate(LraConfig, {**TINY, **{name: TINY.get(name, {}) | more for name, more in sections.items()}}, "test")


def first_token_task(count: int, towers: int = 1) -> Task:
    """The class of an example is the first token of its (first) document, of 3 ids and 4 to 12 tokens."""
    draws = np.random.default_rng(3)

    def split(examples: int) -> Split:
        documents = [draws.integers(3, size=draws.integers(4, 13)).astype(np.uint8) for _ in range(towers * examples)]
        return Split(documents, np.array([int(document[0]) for document in documents[::towers]]))

    return Task(3, 3, split(count), split(30), split(50), towers=2 if towers == 2 else 1)


@pytest.mark.parametrize("shape", [{"layers": 2, "heads": 4, "width": 64}, {"layers": 4, "heads": 4, "width": 256}])
@pytest.mark.parametrize("towers", [1, 2])
def test_all_mixers_have_the_same_number_of_parameters(shape: dict[str, int], towers: int):
    config, task = (
        config_of(model=shape, data={"max_tokens": None}, lra={"mixers": ALL_MIXERS}),
        first_token_task(9, towers),
    )
    counts = {}
    for mixer in ALL_MIXERS:
        encoder = encoder_config(config, task, mixer)
        counts[mixer] = sum(parameter.numel() for parameter in Encoder(encoder).parameters())
    assert all(abs(count / counts["A"] - 1) <= 0.02 for count in counts.values()), counts
    assert encoder_config(config, task, "A").mlp_width == 4 * shape["width"]
    assert [row["parameters"] for row in plan(config, task)] == list(counts.values())


def test_parameters_that_cannot_be_equal_are_an_error():
    config = config_of(model={"layers": 1, "heads": 2, "width": 2}, lra={"mixers": ["S"]})
    with pytest.raises(ConfigError, match=r"lra.mixers: 'S': no MLP makes its parameters .*; set a larger model.width"):
        encoder_config(config, first_token_task(9), "S")


def test_the_plan_counts_the_products_of_all_steps():
    """Two layers of N without an MLP's bias: 6 FLOPs for each token and weight of the blocks."""
    config, task = config_of(), first_token_task(40)
    row = plan(config, task)[1]
    blocks = Encoder(encoder_config(config, task, "N")).blocks
    tokens = task.mean_tokens * config.train.steps * config.train.batch_size
    assert row["flops"] == pytest.approx(6 * tokens * sum(parameter.numel() for parameter in blocks.parameters()))
    attention = plan(config_of(lra={"mixers": ["A"]}), task)[0]
    weights = sum(p.numel() for p in Encoder(encoder_config(config, task, "A")).blocks.parameters())
    squares = np.mean([len(document) ** 2 for document in task.train.documents]) * 4 * 8
    assert attention["flops"] == pytest.approx(6 * tokens * weights + 2 * 12 * 16 * squares)
    config = config_of(lra={"pretraining": [False, True]})
    rows = plan(config, task)
    text = plan_table(config, task, rows)
    assert "40 / 30 / 50 examples" in text
    assert "12 trainings of 4 steps of 8 examples: each model at the learning rates 0.001, 0.01 with seed 0" in text
    # Three trainings with and without self-pretraining, and two self-pretrainings of 3 steps, not 4.
    total = sum(row["flops"] for row in rows) * (2 * 3 + 2 * 3 / 4)
    assert f"4 self-pretrainings of 3 steps. Together {total:.2e} FLOPs." in text


def test_self_pretraining_predicts_masked_tokens_from_the_others():
    """Documents repeat one id, so a masked token is what the others are."""
    draws = np.random.default_rng(0)
    documents = [np.full(draws.integers(5, 13), draws.integers(3), dtype=np.uint8) for _ in range(60)]
    split = Split(documents, np.zeros(60, dtype=np.int64))
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(classes=3, vocab_size=4, layers=1, heads=2, width=16, max_positions=12, pattern="A"))
    head = model.head.linear.weight.clone()
    config = LraPretrainConfig(steps=120, masked_fraction=0.3)
    pretrain(model, split, OptimConfig(lr=1e-2, min_lr=0.0), config, 16, seed=0)
    assert torch.equal(model.head.linear.weight, head)  # only the encoder is trained
    masked = torch.tensor([[2, 2, 3, 2, 2, 2]])
    one, other = (model.encode(ids)[0][0, 2] for ids in (masked, torch.where(masked == 2, 1, masked)))
    assert (one - other).norm() > 0.5 * one.norm()  # what a masked token's features are depends on the others


def test_the_learning_rate_is_the_best_on_the_validation_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    config, task = config_of(), first_token_task(40)
    results = measure(config, task)
    stored = json.loads(Path("runs/lra/eval/listops@lra/results.json").read_text())["results"]
    assert len(stored) == 6  # two mixers, two learning rates with the first seed, one with the other
    for variant, of_seeds in results.items():
        tried = [r for r in stored if r["identity"]["mixer"] == variant.mixer and r["identity"]["seed"] == 0]
        best = max(tried, key=lambda r: r["valid_accuracy"])
        assert [r["identity"]["lr"] for r in of_seeds] == [best["identity"]["lr"]] * 2
        assert [r["identity"]["seed"] for r in of_seeds] == [0, 1]
    assert capsys.readouterr().out.count("training ") == 6
    assert measure(config, task) == results
    assert "training " not in capsys.readouterr().out
    measure(config_of(train={"steps": 2}), task)
    assert capsys.readouterr().out.count("training ") == 6  # another setting is another result


def test_the_table_has_controls_and_published_results():
    config, task = config_of(), first_token_task(40)
    of = lambda accuracies: [
        {"identity": {"lr": 1e-3}, "accuracy": x, "accuracy_standard_error": 0.1, "parameters": 7, "seconds": 2.0}
        for x in accuracies
    ]
    results = {Variant("S", False): of([0.50, 0.58]), Variant("N", False): of([0.40, 0.44])}
    text = results_table(config, task, results)
    # Differences 0.10 and 0.14: mean 0.12, standard error 0.02.
    assert "| S | no | 0.001 | 54.00% ± 4.00% | 50.00% | +12.00% ± 2.00% | 7 | 2 |" in text
    assert "| N | no | 0.001 | 42.00% ± 2.00% | 40.00% |  | 7 | 2 |" in text
    majority = np.mean(task.test.labels == np.bincount(task.train.labels).argmax())
    assert f"The most frequent class of the training split has {majority:.2%}" in text
    assert "| ToST | 37.25% | ToST paper (arXiv 2412.17810) |" in text


def test_a_diverging_learning_rate_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    optim = {"grad_clip": 0.0, "warmup_steps": 0}
    config = config_of(lra={"mixers": ["A"], "learning_rates": [1e30, 1e-3], "seeds": [0]}, optim=optim)
    (result,) = measure(config, first_token_task(40))[Variant("A", False)]
    assert result["identity"]["lr"] == 1e-3
    assert not result["diverged"]


def test_each_seed_is_pretrained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = config_of(lra={"mixers": ["S"], "pretraining": [True]})
    measure(config, first_token_task(40))
    assert capsys.readouterr().out.count("pretraining ") == 2
    assert experiment.stored_results(Path("runs/lra/eval/listops@lra/results.json"))[0]["identity"]["pretrained"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lra": {"mixers": ["TX"]}}, "lra.mixers: 'TX': invalid pattern: 'TX'; use the letters T"),
        ({"lra": {"mixers": ["TTA"]}}, "lra.mixers: 'TTA': model.layers 2 is not a multiple of the 3 letters"),
        ({"optim": {"lr": 1e-3}}, "optim.lr has no effect here; remove it, and set lra.learning_rates"),
        (
            {"optim": {"min_lr": 5e-4}, "lra": {"learning_rates": [1e-4]}},
            "optim.min_lr 0.0005 is above a learning rate of 0.0001",
        ),
        ({"data": {"task": "pathfindr"}}, "data.task: .*pathfinder"),
    ],
)
def test_mistakes_are_named(sections: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config_of(**sections)
