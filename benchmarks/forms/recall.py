"""Multi-query associative recall of a form: `mqar@zoology` in sequences of which most tokens are noise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.forms.lm import FormLM
from tost_lm.eval import recall
from tost_lm.eval.recall_settings import MqarConfig

BATCH = 32
STEPS = 1500
LAYERS, WIDTH = 2, 128
ENOUGH = 0.99
"""The accuracy at which the training ends."""
ASKED = 250
"""Held-out examples that are asked during the training; the result has 1,000 others."""
LENGTHS = 1, 4, 16


def settings(pairs: int) -> MqarConfig:
    """Eight tokens and eight ids for each pair."""
    return MqarConfig(pairs=pairs, seq_len=8 * pairs, vocab_size=8 * pairs)


def loss_of_examples(model: FormLM, config: MqarConfig, seed: int) -> Callable[[int], Tensor]:
    """The loss at each step, on new examples."""

    def loss_of(step: int) -> Tensor:
        examples = recall.draw_examples(config, BATCH, recall.TRAINING, seed, step)
        tokens_BT, labels_BT = map(torch.from_numpy, examples)
        loss = model(tokens_BT, labels_BT).loss
        assert loss is not None
        return loss

    return loss_of


def is_learned(model: FormLM, config: MqarConfig) -> bool:
    """Whether the accuracy on ASKED other examples is ENOUGH."""
    asked = config.model_copy(update={"examples": ASKED, "seed": config.seed + 1})
    return measure(model, asked)["accuracy"] >= ENOUGH


def measure(model: FormLM, config: MqarConfig) -> dict[str, Any]:
    """Accuracy and nats of `tost_lm.eval.recall.evaluate`."""
    return recall.evaluate(model, config, BATCH)  # pyright: ignore[reportArgumentType]


def at_lengths(model: FormLM, config: MqarConfig) -> dict[str, Any]:
    """Accuracy at LENGTHS times the trained length, where the queries are at any distance with equal probability."""
    accuracies = {}
    for times in LENGTHS:
        longer = config.model_copy(update={"seq_len": times * config.seq_len, "power": 1.0, "examples": ASKED})
        accuracies[str(times)] = recall.evaluate(model, longer, 8)["accuracy"]  # pyright: ignore[reportArgumentType]
    return {"accuracy_by_length": accuracies}
