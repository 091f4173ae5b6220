"""Encoders of several mixers and equal parameters, trained and tested on one task of the Long-Range Arena.

For each mixer, without and with self-pretraining: the learning rates are tried with the first seed, and the best one on
the validation split is used with all other seeds. The test split selects nothing. Self-pretraining predicts masked
tokens of the training documents.

Shapes: B = 1 row of packed documents, M tokens, N documents, C channels, V ids.
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tost_lm.errors import ConfigError, TrainingError
from tost_lm.eval.small_models import Result, fit, scale_initial_std, store_result, stored_results
from tost_lm.extra.encoder.model import Encoder
from tost_lm.extra.encoder.settings import EncoderConfig
from tost_lm.extra.lra.settings import BAG_OF_TOKENS, LraConfig, LraPretrainConfig
from tost_lm.extra.lra.tasks import Split, Task
from tost_lm.files import require_writable
from tost_lm.inference.subject import pick_device, results_path
from tost_lm.optim.settings import OptimConfig
from tost_lm.version import VERSION

TOLERANCE = 0.02
"""Relative difference between the numbers of parameters of all encoders."""
PRETRAINING, TRAINING = 0, 1
"""Random streams of a seed."""

Weights = dict[str, Tensor]


class Variant(NamedTuple):
    """An encoder that is trained at several learning rates and seeds."""

    mixer: str
    pretrained: bool

    @property
    def name(self) -> str:
        return f"{self.mixer}, self-pretrained" if self.pretrained else self.mixer


def protocol(config: LraConfig) -> str:
    return f"{config.data.task}@lra"


def variants(config: LraConfig) -> list[Variant]:
    return [Variant(mixer, pretrained) for mixer in config.lra.mixers for pretrained in config.lra.pretraining]


def encoder_config(config: LraConfig, task: Task, mixer: str) -> EncoderConfig:
    """The encoder of a mixer, whose MLP has as many channels as make its parameters those of softmax attention with an
    MLP of 4 times the width.

    Raises:
        ConfigError: no MLP makes them equal.
    """
    wanted = _parameters(_with_mlp(config, task, "A", 4 * config.model.width))
    one, two = (_parameters(_with_mlp(config, task, mixer, channels)) for channels in (1, 2))
    channels = 1 + round((wanted - one) / (two - one))
    matched = _with_mlp(config, task, mixer, max(1, channels))
    if abs(_parameters(matched) / wanted - 1) > TOLERANCE:
        raise ConfigError(
            f"lra.mixers: {mixer!r}: no MLP makes its parameters {wanted:,}, those of softmax attention; set a larger "
            "model.width"
        )
    return matched


def _with_mlp(config: LraConfig, task: Task, mixer: str, channels: int) -> EncoderConfig:
    return EncoderConfig(
        pattern=mixer,
        mlp_width=channels,
        classes=task.classes,
        vocab_size=task.vocab_size + 1,  # and the mask of self-pretraining
        towers=task.towers,
        positions="none" if set(mixer) == {BAG_OF_TOKENS} else "learned",
        max_positions=config.data.tokens,
        **config.model.model_dump(),
    )


def _parameters(config: EncoderConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Encoder(config).parameters())


def plan(config: LraConfig, task: Task) -> list[dict[str, Any]]:
    """For each mixer: parameters, channels of its MLP, and FLOPs of one training without self-pretraining.

    The FLOPs are those of matrix products, 6 for each token and weight, and 12·C for each token and token that an A
    layer attends to.
    """
    squares = sum(len(document) ** 2 for document in task.train.documents)
    tokens = sum(len(document) for document in task.train.documents)
    examples = config.train.steps * config.train.batch_size
    rows = []
    for mixer in config.lra.mixers:
        encoder = encoder_config(config, task, mixer)
        with torch.device("meta"):
            blocks = Encoder(encoder).blocks
        weights = sum(parameter.numel() for parameter in blocks.parameters())
        attention = encoder.letters.count("A") * 12 * encoder.width * squares
        flops = (6 * weights * tokens + attention) * examples / len(task.train.labels)
        rows.append(
            {"mixer": mixer, "parameters": _parameters(encoder), "mlp_width": encoder.mlp_width, "flops": flops}
        )
    return rows


def measure(config: LraConfig, task: Task) -> dict[Variant, list[Result]]:
    """The results of each variant at its best learning rate, by seed. Each is stored at once, and reused if it exists.

    Raises:
        ConfigError: a mixer cannot have the parameters of the others.
    """
    found = {}
    for variant in variants(config):
        encoder = encoder_config(config, task, variant.mixer)
        trainings = Trainings(config, task, variant, encoder)
        first, *others = config.lra.seeds
        of_rates = [trainings.result(lr, first) for lr in config.lra.learning_rates]
        best = max(of_rates, key=lambda result: result["valid_accuracy"])
        found[variant] = [best, *(trainings.result(best["identity"]["lr"], seed) for seed in others)]
    return found


class Trainings:
    """The trainings of a variant."""

    def __init__(self, config: LraConfig, task: Task, variant: Variant, encoder: EncoderConfig) -> None:
        self._config, self._task, self._variant, self._encoder = config, task, variant, encoder
        self._path = results_path(Path("runs") / config.lra.name, protocol(config))
        self._pretrained: tuple[int, Weights] | None = None
        """The last seed that was pretrained, and its weights."""

    def result(self, lr: float, seed: int) -> Result:
        """The stored result of this training, or that of a new one."""
        identity = self._identity(lr, seed)
        kept = next((result for result in stored_results(self._path) if result["identity"] == identity), None)
        result = kept or {"identity": identity, **self._train_and_test(lr, seed)}
        if kept is None:
            store_result(self._path, protocol(self._config), result)
        print(
            f"{self._variant.name}, learning rate {lr:g}, seed {seed}: {result['valid_accuracy']:.2%} on the "
            f"validation split, {'reused from' if kept else 'stored in'} {self._path}",
            flush=True,
        )
        return result

    def _train_and_test(self, lr: float, seed: int) -> Result:
        require_writable(self._path)
        config, task, split = self._config, self._task, self._task.train
        batch_size = config.train.batch_size
        began = time.monotonic()
        model = self._start(seed)
        print(f"training {self._variant.name}, learning rate {lr:g}, seed {seed}", flush=True)
        diverged = False
        try:
            train(model, split, config.optim_at(lr), config.train.steps, batch_size, seed)
        except TrainingError as error:  # another learning rate of the grid may train
            print(f"  {error}", flush=True)
            diverged = True
        model.eval()
        return {
            "valid_accuracy": 0.0 if diverged else evaluate(model, task.valid, batch_size)["accuracy"],
            **evaluate(model, task.test, batch_size),
            "diverged": diverged,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "mlp_width": self._encoder.mlp_width,
            "seconds": time.monotonic() - began,
        }

    def _start(self, seed: int) -> Encoder:
        """A new model, with the weights of self-pretraining if the variant has it."""
        torch.manual_seed(seed)
        model = Encoder(self._encoder)
        scale_initial_std(model, self._encoder.width)
        model.to(pick_device())
        if self._variant.pretrained:
            if self._pretrained is None or self._pretrained[0] != seed:
                config = self._config
                print(f"pretraining {self._variant.mixer}, seed {seed}", flush=True)
                optim = config.optim_at(config.pretraining.lr)
                pretrain(model, self._task.train, optim, config.pretraining, config.train.batch_size, seed)
                self._pretrained = seed, {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(self._pretrained[1])
        return model

    def _identity(self, lr: float, seed: int) -> dict[str, Any]:
        config = self._config
        settings = {section: getattr(config, section).model_dump() for section in ("model", "train")}
        settings["optim"] = config.optim.model_dump(exclude={"lr"})
        if self._variant.pretrained:
            settings["pretraining"] = config.pretraining.model_dump()
        return {
            "tost_lm": VERSION,
            "task": config.data.task,
            "data_xxh3": self._task.digest,
            "max_tokens": config.data.tokens,
            "mixer": self._variant.mixer,
            "pretrained": self._variant.pretrained,
            "lr": lr,
            "seed": seed,
            "settings": settings,
        }


def train(model: Encoder, split: Split, optim: OptimConfig, steps: int, batch_size: int, seed: int) -> None:
    """Train the classes of documents. Raises TrainingError when the loss is not finite."""
    batches = _batches(len(split.labels), batch_size, np.random.default_rng((seed, TRAINING)))

    def loss_of(_step: int) -> Tensor:
        return cross_entropy(*_logits_and_labels(model, split, next(batches)))

    fit(model, optim, steps, loss_of)


def pretrain(
    model: Encoder, split: Split, optim: OptimConfig, config: LraPretrainConfig, batch_size: int, seed: int
) -> None:
    """Train the encoder to predict masked tokens from the others; the layer that predicts is dropped.

    A masked token is the last id of the embedding. Raises TrainingError when the loss is not finite.
    """
    assert model.config.vocab_size
    mask_id = model.config.vocab_size - 1
    draws = np.random.default_rng((seed, PRETRAINING))
    batches = _batches(len(split.documents), batch_size, draws)
    head = nn.Linear(model.config.width, mask_id).to(_device(model))

    def loss_of(_step: int) -> Tensor:
        ids_BM, cu_seqlens = _pack(model, [split.documents[i] for i in next(batches)])
        masked = torch.from_numpy(draws.random(ids_BM.shape) < config.masked_fraction).to(ids_BM.device)
        masked[0, int(draws.integers(ids_BM.shape[1]))] = True  # at least one
        features_BMC, _ = model.encode(ids_BM.masked_fill(masked, mask_id), cu_seqlens)
        return cross_entropy(head(features_BMC[masked]), ids_BM[masked])

    fit(nn.ModuleList([model, head]), optim, config.steps, loss_of)


@torch.inference_mode()
def evaluate(model: Encoder, split: Split, batch_size: int) -> Result:
    """Accuracy, and its standard error over examples."""
    right, count = [], len(split.labels)
    for start in range(0, count, batch_size):
        logits, labels = _logits_and_labels(model, split, np.arange(start, min(count, start + batch_size)))
        right.append((logits.argmax(-1) == labels).double())
    right_N = torch.cat(right)
    return {
        "accuracy": float(right_N.mean()),
        "accuracy_standard_error": float(right_N.std()) / math.sqrt(count),
    }


def _batches(count: int, batch_size: int, draws: np.random.Generator) -> Iterator[np.ndarray]:
    """Numbers of examples, epoch after epoch in new orders; incomplete batches are left out."""
    size = min(batch_size, count)
    while True:
        order = draws.permutation(count)
        yield from order[: count - count % size].reshape(-1, size)


def _logits_and_labels(model: Encoder, split: Split, examples: np.ndarray) -> tuple[Tensor, Tensor]:
    towers = model.config.towers
    documents = [split.documents[towers * i + tower] for i in examples for tower in range(towers)]
    logits_NV = model(*_pack(model, documents)).float()
    return logits_NV, torch.from_numpy(split.labels[examples]).to(logits_NV.device)


def _pack(model: Encoder, documents: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """One row of documents [1, M] on the model's device, and their offsets on the host."""
    ids_BM = torch.from_numpy(np.concatenate(documents))[None].long().to(_device(model))
    return ids_BM, torch.tensor([0, *map(len, documents)]).cumsum(0)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
