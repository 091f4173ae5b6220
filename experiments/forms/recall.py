"""Multi-query associative recall of a form: `mqar@zoology` in sequences of which most tokens are noise."""

from typing import Any

from experiments.forms.lm import FormLM
from experiments.mqar import MqarConfig, evaluate

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


def is_learned(model: FormLM, config: MqarConfig) -> bool:
    """Whether the accuracy on ASKED other examples is ENOUGH."""
    asked = config.model_copy(update={"examples": ASKED, "seed": config.seed + 1})
    return evaluate(model, asked, BATCH)["accuracy"] >= ENOUGH


def at_lengths(model: FormLM, config: MqarConfig) -> dict[str, Any]:
    """Accuracy at LENGTHS times the trained length, where the queries are at any distance with equal probability."""
    accuracies = {}
    for times in LENGTHS:
        longer = config.model_copy(update={"seq_len": times * config.seq_len, "power": 1.0, "examples": ASKED})
        accuracies[str(times)] = evaluate(model, longer, 8)["accuracy"]
    return {"accuracy_by_length": accuracies}
