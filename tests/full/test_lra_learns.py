"""Encoders learn the first token of a document, which a bag of tokens cannot know, and ListOps better than a bag."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tost_lm.config import load_config
from tost_lm.eval.small_models import scale_initial_std
from tost_lm.extra.encoder.model import Encoder
from tost_lm.extra.lra.experiment import Variant, encoder_config, evaluate, measure, train
from tost_lm.extra.lra.settings import LraConfig
from tost_lm.extra.lra.tasks import Split, Task, load

RECIPE = Path(__file__).parents[2] / "configs/eval/lra_small.toml"


def first_token_task() -> Task:
    """The class of a document is its first token, one of 3 ids."""
    draws = np.random.default_rng(3)

    def split(examples: int) -> Split:
        documents = [draws.integers(3, size=draws.integers(10, 16)).astype(np.uint8) for _ in range(examples)]
        return Split(documents, np.array([int(document[0]) for document in documents]))

    return Task(3, 3, split(1000), split(10), split(500))


def test_every_mixer_learns_the_first_token_and_a_bag_of_tokens_does_not():
    config, task = load_config(LraConfig, RECIPE, ["model.width=32"]), first_token_task()
    accuracy = {}
    for mixer in config.lra.mixers:
        torch.manual_seed(0)
        model = Encoder(encoder_config(config, task, mixer))
        scale_initial_std(model, 32)
        train(model, task.train, config.optim_at(3e-3), 200, 32, seed=0)
        accuracy[mixer] = evaluate(model, task.test, 100)["accuracy"]
    assert accuracy.pop("N") < 0.6
    assert min(accuracy.values()) > 0.9, accuracy


def test_softmax_attention_is_above_the_bag_of_tokens_on_listops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings = [
        'lra.mixers=["A", "N"]', "lra.learning_rates=[3e-3]", "lra.seeds=[0]", "lra.pretraining=[false]",
        "train.steps=200",
    ]  # fmt: skip
    config = load_config(LraConfig, RECIPE, settings)
    results = measure(config, load(config))
    (a,), (n,) = results[Variant("A", False)], results[Variant("N", False)]
    error = float(np.hypot(a["accuracy_standard_error"], n["accuracy_standard_error"]))
    assert a["accuracy"] > n["accuracy"] + 2 * error
    assert n["accuracy"] > 0.15  # above the most frequent class, which has 11 %
