"""Multi-query associative recall (the task mqar@zoology): trains and tests small models of several patterns.

    python -m experiments.mqar experiments/mqar.toml
    python -m experiments.mqar experiments/mqar.toml 'recall.patterns=["T"]'

Prints a table of accuracy at held-out queries by pattern, and the accuracy of guessing. The result of each model is
written to runs/NAME/eval/mqar@zoology/results.json as soon as it is trained; a model that has a result is not trained
again.

The task follows Arora et al. 2023, arXiv 2312.04927:

    k₁ v₁ k₂ v₂ … kₙ vₙ   · · k₂ · · · k₁ · · …        label of each query: the value of its key

An example begins with `pairs` pairs of a key and its value. Each key appears once more as a query, at the first token
of a slot of two, where the model must predict the value. Keys are distinct ids of the lower half of the vocabulary,
values independent ids of the upper half. Slots g = 1, 2, … are drawn without replacement with weight g^(power − 1), so
most queries are near the pairs and a few are far away. The assignment of keys to slots is uniform, so the position of a
query does not depend on its value. All other tokens are noise: any ids except the keys of the example.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, ValidationError, model_validator
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tost_lm.command_line import run_program
from tost_lm.config import Section
from tost_lm.errors import TrainingError
from tost_lm.files import require_writable
from tost_lm.inference.evaluated import pick_device, read_result_file, results_path, write_result_file
from tost_lm.markdown import table
from tost_lm.model import ModelConfig, TostLM
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.optim.interface import optimizer_of
from tost_lm.optim.settings import OptimConfig, learning_rate, obstacle_to_schedule
from tost_lm.version import VERSION


class MqarConfig(Section):
    """The task `mqar@zoology`."""

    pairs: int = Field(default=4, gt=0)
    """Keys per example. Each appears once with its value and once as a query."""
    seq_len: int = Field(default=64, gt=0)
    """Tokens per example."""
    vocab_size: int = Field(default=256, gt=0)
    """Size of the vocabulary; the lower half are keys, the upper half values."""
    power: float = Field(default=0.01, ge=0, le=1)
    """A query is drawn for slot g after the pairs with weight g^(power − 1); 1: uniform."""
    examples: int = Field(default=1000, gt=1)
    """Held-out examples for the test."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all examples."""

    @property
    def slots(self) -> int:
        """Slots of two tokens after the pairs; each can have a query."""
        return (self.seq_len - 2 * self.pairs) // 2

    @model_validator(mode="after")
    def _check_pairs(self) -> "MqarConfig":
        if self.vocab_size % 2:
            raise ValueError(f"mqar.vocab_size: {self.vocab_size} is odd; set an even size, half keys and half values")
        if self.pairs > self.vocab_size // 2:
            raise ValueError(
                f"mqar.pairs: {self.pairs} distinct keys do not fit; set mqar.vocab_size to {2 * self.pairs} or more"
            )
        if self.pairs > self.slots:
            raise ValueError(
                f"mqar.pairs: {self.pairs} pairs do not fit; set mqar.seq_len to {4 * self.pairs} or more, two tokens "
                "for each pair and two for its query"
            )
        return self


class RecallTrainConfig(Section):
    """Length of the training."""

    steps: int = Field(default=1000, gt=0)
    """Training steps of each model."""
    batch_size: int = Field(default=64, gt=0)
    """Examples per step."""


class RecallModelsConfig(Section):
    """The models to train. They share all other settings, and each has its own result."""

    name: str = Field(default="mqar", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Results are written to runs/NAME/eval/mqar@zoology."""
    patterns: list[str] = Field(default=["A", "TA", "AT", "T"], min_length=1)
    """Values of model.pattern."""
    seeds: list[NonNegativeInt] = Field(default=[0], min_length=1)
    """Seeds of weights and training examples; each pattern is trained with each seed."""


class RecallConfig(Section):
    """Settings of `experiments.mqar`."""

    model: ModelConfig
    mqar: MqarConfig = Field(default_factory=MqarConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: RecallTrainConfig = Field(default_factory=RecallTrainConfig)
    recall: RecallModelsConfig = Field(default_factory=RecallModelsConfig)

    def model_of(self, pattern: str) -> ModelConfig:
        return ModelConfig.model_validate({**self.model.model_dump(), "pattern": pattern})

    @model_validator(mode="after")
    def _schedule_fits_steps(self) -> "RecallConfig":
        if obstacle := obstacle_to_schedule(self.optim, self.train.steps):
            raise ValueError(obstacle)
        return self

    @model_validator(mode="after")
    def _check_models(self) -> "RecallConfig":
        if self.model.vocab_size != self.mqar.vocab_size:
            raise ValueError(
                f"model.vocab_size: {self.model.vocab_size} is not mqar.vocab_size {self.mqar.vocab_size}; make them "
                "equal"
            )
        for pattern in self.recall.patterns:
            try:
                limit = self.model_of(pattern).position_limit
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"recall.patterns: {pattern!r}: {message}") from None
            if limit is not None and limit < self.mqar.seq_len:
                raise ValueError(
                    f"mqar.seq_len: {self.mqar.seq_len} exceeds the model's positions; set model.max_positions "
                    f"({limit}) to it or more"
                )
        return self


class Examples(NamedTuple):
    """`tokens` and `labels`, int64 [examples, T]; the label of a query is its value, elsewhere −100."""

    tokens: np.ndarray
    labels: np.ndarray


def draw_examples(config: MqarConfig, count: int, *stream: int) -> Examples:
    """`count` examples, a pure function of the settings, the count and the numbers of the random stream."""
    draws = np.random.default_rng((config.seed, *stream))
    pairs, half = config.pairs, config.vocab_size // 2
    keys = _distinct(draws, count, pairs, half)
    values = draws.integers(half, config.vocab_size, (count, pairs))
    queries = 2 * (pairs + _slots(draws, count, config))
    tokens = _integers_without(draws, (count, config.seq_len), config.vocab_size, np.sort(keys, axis=1))
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values
    np.put_along_axis(tokens, queries, keys, axis=1)
    labels = np.full_like(tokens, IGNORED_LABEL)
    np.put_along_axis(labels, queries, values, axis=1)
    return Examples(tokens, labels)


def slot_weights(config: MqarConfig) -> np.ndarray:
    """Probability of each slot in the first draw, float64 [slots]."""
    weights = np.arange(1, config.slots + 1) ** (config.power - 1)
    return weights / weights.sum()


def _slots(draws: np.random.Generator, count: int, config: MqarConfig) -> np.ndarray:
    """The slot of each key's query, [count, pairs]."""
    # The largest log-weights plus Gumbel noise are distributed as successive draws without replacement.
    noisy = np.log(slot_weights(config)) + draws.gumbel(size=(count, config.slots))
    return draws.permuted(np.argsort(-noisy, axis=1)[:, : config.pairs], axis=1)


def _distinct(draws: np.random.Generator, count: int, size: int, below: int) -> np.ndarray:
    """Rows of `size` distinct integers below `below`, uniformly distributed, [count, size]."""
    rows = np.empty((count, size), dtype=np.int64)
    for i in range(size):
        rows[:, i] = _integers_without(draws, (count, 1), below, np.sort(rows[:, :i], axis=1))[:, 0]
    return rows


def _integers_without(draws: np.random.Generator, shape: tuple[int, int], below: int, taken: np.ndarray) -> np.ndarray:
    """Integers below `below` that are not in their row of `taken`, whose rows are distinct and ascending."""
    drawn = draws.integers(below - taken.shape[1], size=shape)
    for column in taken.T:
        drawn += drawn >= column[:, None]
    return drawn


TASK = "mqar@zoology"
TRAINING, TESTING = 0, 1
"""Random streams of examples; training has one per seed and step."""

Result = dict[str, Any]
"""`identity`: version, settings, pattern and seed; `accuracy` of queries with `accuracy_standard_error`; `nats` per
query; `queries`; `parameters`; `seconds` of training."""


def measure(config: RecallConfig) -> list[Result]:
    """A result for each pattern and seed, in their order. Each is stored at once, and reused if it exists.

    Raises:
        ConfigError: the stored results are damaged or were edited.
        TrainingError: a loss is not finite.
    """
    path = results_path(Path("runs") / config.recall.name, TASK)
    results = []
    for pattern in config.recall.patterns:
        for seed in config.recall.seeds:
            identity = _identity(config, pattern, seed)
            kept = next((result for result in stored_results(path) if result["identity"] == identity), None)
            if kept is None:
                require_writable(path)
            result = kept or {"identity": identity, **_train_and_test(config, pattern, seed)}
            if kept is None:
                store_result(path, TASK, result)
            print(
                f"{pattern}, seed {seed}: {result['accuracy']:.2%} ± {result['accuracy_standard_error']:.2%} of "
                f"queries, {result['nats']:.4f} nats, {'reused from' if kept else 'stored in'} {path}",
                flush=True,
            )
            results.append(result)
    return results


def draw_model(config: ModelConfig, seed: int) -> TostLM:
    torch.manual_seed(seed)
    return TostLM(config)


def loss_of_examples(model: nn.Module, config: MqarConfig, batch_size: int, seed: int) -> Callable[[int], Tensor]:
    """The loss at each step, on new examples."""
    device = next(model.parameters()).device

    def loss_of(step: int) -> Tensor:
        tokens_BT, labels_BT = _on(device, draw_examples(config, batch_size, TRAINING, seed, step))
        return model(tokens_BT, labels=labels_BT, output_state=False).loss

    return loss_of


def train(model: nn.Module, optim: OptimConfig, steps: int, loss_of: Callable[[int], Tensor]) -> None:
    """Minimize `loss_of(step)`. Raises TrainingError: a loss is not finite."""
    optimizer = optimizer_of(optim).build(model, optim)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, optim)
        loss = loss_of(step)
        loss.backward()
        if optim.grad_clip:
            clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if not math.isfinite(value := loss.item()):
            raise TrainingError(f"the loss is {value} after {step + 1} steps; lower the learning rate")


@torch.inference_mode()
def evaluate(model: nn.Module, config: MqarConfig, batch_size: int) -> Result:
    """Accuracy at the queries of the held-out examples, its standard error over examples, and nats per query."""
    right, nats = [], []
    examples = draw_examples(config, config.examples, TESTING)
    for start in range(0, config.examples, batch_size):
        batch = Examples(*(column[start : start + batch_size] for column in examples))
        tokens_BT, labels_BT = _on(next(model.parameters()).device, batch)
        log_probs_BTV = torch.log_softmax(model(tokens_BT, output_state=False).logits.float(), dim=-1)
        asked_BT = labels_BT != IGNORED_LABEL
        answers = labels_BT[asked_BT]
        right.append((log_probs_BTV[asked_BT].argmax(-1) == answers).view(-1, config.pairs).double().mean(1))
        nats.append(-log_probs_BTV[asked_BT].gather(1, answers[:, None]).double().view(-1, config.pairs).mean(1))
    accuracy_N = torch.cat(right)
    return {
        "accuracy": float(accuracy_N.mean()),
        "accuracy_standard_error": float(accuracy_N.std()) / math.sqrt(config.examples),
        "nats": float(torch.cat(nats).mean()),
        "queries": config.examples * config.pairs,
    }


def recall_table(results: Sequence[Result]) -> str:
    """A Markdown row for each pattern, the mean over its seeds, and the accuracy of guessing below."""
    settings, rows = results[0]["identity"]["settings"], []
    for pattern in dict.fromkeys(result["identity"]["pattern"] for result in results):
        of_pattern = [result for result in results if result["identity"]["pattern"] == pattern]
        right, error = [result["accuracy"] for result in of_pattern], of_pattern[0]["accuracy_standard_error"]
        if len(right) > 1:
            error = stdev(right) / math.sqrt(len(right))
        layers = pattern * (settings["model"]["layers"] // len(pattern))
        rows.append((layers, str(len(right)), f"{fmean(right):.2%} ± {error:.2%}"))
    mqar = settings["mqar"]
    return (
        f"{table(('layers', 'seeds', 'accuracy at queries'), rows)}\n\n± is the standard error over seeds, or over the "
        f"{mqar['examples']:,} examples of one. Guessing: {2 / mqar['vocab_size']:.2%} of all values, "
        f"{1 / mqar['pairs']:.1%} of the example's own."
    )


def _train_and_test(config: RecallConfig, pattern: str, seed: int) -> Result:
    print(f"training {pattern}, seed {seed}", flush=True)
    model = draw_model(config.model_of(pattern), seed).to(pick_device())
    began = time.monotonic()
    train(model, config.optim, config.train.steps, loss_of_examples(model, config.mqar, config.train.batch_size, seed))
    seconds = time.monotonic() - began
    model.eval()
    return {
        **evaluate(model, config.mqar, config.train.batch_size),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
    }


def _identity(config: RecallConfig, pattern: str, seed: int) -> dict[str, Any]:
    settings = config.model_copy(update={"model": config.model_of(pattern)})
    return {
        "tost_lm": VERSION,
        "pattern": pattern,
        "seed": seed,
        "settings": settings.model_dump(mode="json", exclude={"recall"}),
    }


def _on(device: torch.device, examples: Examples) -> tuple[Tensor, Tensor]:
    tokens_BT, labels_BT = (torch.from_numpy(column).to(device) for column in examples)
    return tokens_BT, labels_BT


def stored_results(path: Path) -> list[Result]:
    """The results of earlier calls; none without the file. Raises as `read_result_file`."""
    stored = read_result_file(path)
    return stored["results"] if stored else []


def store_result(path: Path, protocol: str, result: Result) -> None:
    """Append a result to the stored ones."""
    write_result_file(path, {"protocol": protocol, "results": [*stored_results(path), result]})


def main(_: Path, config: RecallConfig) -> None:
    results = measure(config)
    print(f"\n{recall_table(results)}")


if __name__ == "__main__":
    run_program(main, name="experiments.mqar", doc=__doc__ or "", positional="CONFIG", config=RecallConfig)
