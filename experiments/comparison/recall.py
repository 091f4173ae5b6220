"""Multi-query associative recall (`mqar@zoology`) of 16 pairs, trained in 128 tokens and tested in longer texts too."""

import copy
import time
from typing import Any

import torch

from experiments.mqar import MqarConfig, draw_model, evaluate, loss_of_examples
from experiments.training import train
from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.softmax.layer import SoftmaxMixer
from tost_lm.model import ModelConfig, TostLM
from tost_lm.optim.settings import OptimConfig

MQAR = MqarConfig(pairs=16, seq_len=128, vocab_size=128)
OPTIM, RATES = OptimConfig(warmup_steps=150, weight_decay=0.0), [1e-3, 3e-3, 1e-2]
STEPS, BATCH = 1500, 32
LENGTHS = 1, 4, 16
"""Multiples of the trained length; queries are at any distance with equal probability."""
EXAMPLES = 250


def recall(config: ModelConfig, optim: OptimConfig, seed: int) -> dict[str, Any]:
    """Train a model; its accuracy by length, and that without the softmax layers' outputs if it has other layers."""
    since = time.perf_counter()
    model = draw_model(config, seed)
    train(model, optim, STEPS, loss_of_examples(model, MQAR, BATCH, seed))
    found = {"train_seconds": time.perf_counter() - since, "accuracy": by_length(model)}
    if zeroed := without_attention(model):
        found["without_attention"] = by_length(zeroed)
    return found


def by_length(model: TostLM) -> dict[str, float]:
    accuracies = {}
    for times in LENGTHS:
        longer = MQAR.model_copy(update={"seq_len": times * MQAR.seq_len, "power": 1.0, "examples": EXAMPLES})
        accuracies[str(times)] = evaluate(model.eval(), longer, 8)["accuracy"]
    return accuracies


@torch.no_grad()
def without_attention(model: TostLM) -> TostLM | None:
    """A copy whose softmax layers add nothing. None: there are none, or no others."""
    copied = copy.deepcopy(model)
    mixers = [mixer for mixer in copied.modules() if isinstance(mixer, TokenMixer)]
    of_softmax = [mixer for mixer in mixers if isinstance(mixer, SoftmaxMixer)]
    for mixer in of_softmax:
        mixer.out_proj.weight.zero_()
    return copied if 0 < len(of_softmax) < len(mixers) else None
