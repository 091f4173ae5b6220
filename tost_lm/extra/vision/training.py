"""Fine-tuning of an image classifier, in one process.

The order of images, their augmentation and stochastic depth are functions of the seed and of the epoch or the step. So
a run resumes bit-exactly from any step, as shown on a CPU.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tost_lm.checkpointing.format import SETTINGS, Progress, StoredTensors, shard_name, write_checkpoint, write_tensors
from tost_lm.checkpointing.run_folder import find_checkpoint, prune, step_folder, step_folders
from tost_lm.checkpointing.run_lock import run_lock
from tost_lm.checkpointing.settings import CheckpointConfig
from tost_lm.config import differences, load_config, to_toml
from tost_lm.data.samples import permuted
from tost_lm.errors import CheckpointError, ConfigError, DataError, TrainingError
from tost_lm.extra.vision.accuracy import in_words, measure_accuracy
from tost_lm.extra.vision.classifier import TostVision
from tost_lm.extra.vision.images import Images, Transform, batches, checked, open_images, seed_of
from tost_lm.extra.vision.interop import load_vision
from tost_lm.extra.vision.settings import VisionTrainConfig
from tost_lm.files import read_rows, write_atomically
from tost_lm.inference.subject import pick_device
from tost_lm.optim.optimizers import build_optimizer, statistics_of
from tost_lm.optim.settings import learning_rate, obstacle_to_schedule
from tost_lm.parallel.graceful_stop import GracefulStop
from tost_lm.pretrain.metrics import drop_rows_after
from tost_lm.progress import Progress as ProgressBar

METRICS, VALIDATION = "metrics.jsonl", "validation.jsonl"
CLASSES = "classes.json"
"""In a checkpoint: the names of the classes, in the order of the logits."""
MAY_CHANGE = ("run.", "data.workers:", "data.test_split:", "train.evaluate_every:")
"""Settings without effect on the weights."""
SAME = ("layers", "heads", "width", "patch_size")
"""Settings that initial weights must share."""
SAVE_S = 60.0
"""Time for the last checkpoint before run.max_minutes."""
KEPT = CheckpointConfig(keep_latest_k=2)


class Transforms(NamedTuple):
    """Transforms of images that are trained on, and of those that are evaluated."""

    training: Transform
    evaluation: Transform


def fine_tune(config: VisionTrainConfig, transforms: Transforms, stop: GracefulStop) -> str:
    """Train, or resume, up to the last epoch. Returns why the run stopped before; empty: it is complete.

    Raises:
        ConfigError: settings do not fit the images, the initial weights or the run in the folder.
        DataError: images cannot be read, or differ from those that the run was trained on.
        CheckpointError: a checkpoint is damaged, or cannot be written.
        TrainingError: the loss is not finite.
    """
    images, held_out = (open_images(config.data, split) for split in (config.data.train_split, config.data.test_split))
    _check_classes(config, images, held_out)
    with run_lock(config.run_folder, 0) as check_folder:
        run = _Run(config, transforms, images, held_out, stop, check_folder)
        stop.start_training(lambda: "")
        return run.train()


class _Run:
    def __init__(
        self,
        config: VisionTrainConfig,
        transforms: Transforms,
        images: Images,
        held_out: Images,
        stop: GracefulStop,
        check_folder: Callable[[], None],
    ) -> None:
        self._config, self._transforms, self._stop, self._check_folder = config, transforms, stop, check_folder
        self._images, self._held_out = images, held_out
        self._steps_per_epoch = math.ceil(len(images) / config.train.batch_size)
        self._steps = config.train.epochs * self._steps_per_epoch
        if obstacle := obstacle_to_schedule(config.optim, self._steps):
            raise ConfigError(obstacle.replace("train.steps", f"{config.train.epochs} epochs of"))
        checkpoint = self._checkpoint()
        torch.manual_seed(config.train.seed)
        self._model = load_vision(checkpoint) if checkpoint else initial_model(config)
        self._device = torch.device(pick_device())
        self._model.to(self._device)
        self._optimizer = build_optimizer(self._model, config.optim)
        self._step = self._restore(checkpoint) if checkpoint else 0
        check_folder()
        write_atomically(config.run_folder / SETTINGS, to_toml(config))
        for name in (METRICS, VALIDATION):
            drop_rows_after(config.run_folder / name, self._step)
        start = f"resuming from {checkpoint}" if checkpoint else "starting"
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        print(
            f"{start}: {parameters:,} parameters, {len(images):,} images of {len(images.classes)} classes, step "
            f"{self._step:,} of {self._steps:,}, on {self._device.type}",
            flush=True,
        )

    def train(self) -> str:
        """Train to the last step or to a stop. Returns and raises like `fine_tune`."""
        while not (reason := self._evaluate()) and self._step < self._steps:
            for pixels, labels in self._rest_of_epoch():
                if reason := self._stop.requested(SAVE_S):
                    self._save()
                    return reason
                self._update(pixels, labels)
            self._save()
        if reason:
            return reason
        print(f"complete after {self._step:,} steps: {step_folder(self._config.run_folder, self._step)}")
        return ""

    def _rest_of_epoch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the epoch that the next step is in, from that step on."""
        train, data = self._config.train, self._config.data
        epoch, done = divmod(self._step, self._steps_per_epoch)
        order = permuted(np.arange(len(self._images)), len(self._images), train.seed, epoch)
        loader = batches(
            self._images, self._transforms.training, train.batch_size, data.workers, order[done * train.batch_size :],
            f"{train.seed}/{epoch}",
        )  # fmt: skip
        self._started, self._seen = time.monotonic(), 0
        return checked(loader)

    def _update(self, pixels: Tensor, labels: Tensor) -> None:
        config = self._config
        lr = learning_rate(self._step, self._steps, config.optim)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        torch.manual_seed(seed_of(config.train.seed, "step", self._step))  # of stochastic depth
        pixels, labels = pixels.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)
        self._model.train()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=config.train.dtype == "bfloat16"):
            logits = self._model(pixels)
        loss = cross_entropy(logits.float(), labels)
        loss.backward()
        if config.optim.grad_clip:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.optim.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1
        self._seen += len(labels)
        if self._step % config.run.log_every == 0 or self._step % self._steps_per_epoch == 0:
            self._record(loss.item(), lr)

    def _record(self, loss: float, lr: float) -> None:
        if not math.isfinite(loss):
            raise TrainingError(
                f"{self._config.run_folder}: the loss is {loss} at step {self._step:,}; lower optim.lr and train under "
                "another run.name"
            )
        rate = self._seen / (time.monotonic() - self._started)
        epoch = self._step / self._steps_per_epoch
        row = {"step": self._step, "epoch": epoch, "loss": loss, "lr": lr, "images_per_second": rate}
        self._append(METRICS, row)
        print(f"step {self._step:,}, epoch {epoch:.2f}: loss {loss:.4f}, {rate:,.0f} images/s", flush=True)

    def _evaluate(self) -> str:
        """Evaluate the test split if an evaluation is due and not recorded. Returns why it was stopped."""
        train, epoch = self._config.train, self._step // self._steps_per_epoch
        is_due = self._step == self._steps or (self._step and epoch % train.evaluate_every == 0)
        path = self._config.run_folder / VALIDATION
        if self._step % self._steps_per_epoch or not is_due or any(r["step"] == self._step for r in read_rows(path)):
            return ""
        with ProgressBar("evaluating", "images") as bar:

            def show_or_stop(done: int, total: int) -> None:
                if reason := self._stop.requested(0.0):
                    raise _StoppedError(reason)
                bar(done, total)

            measured = self._model.eval(), self._held_out, self._transforms.evaluation
            try:
                result = measure_accuracy(*measured, train.batch_size, self._config.data.workers, show_or_stop)
            except _StoppedError as stopped:
                return str(stopped)
        self._append(VALIDATION, {"step": self._step, "epoch": epoch, "split": self._config.data.test_split, **result})
        print(f"epoch {epoch}: {in_words(result)}", flush=True)
        return ""

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with (self._config.run_folder / name).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _save(self) -> None:
        self._check_folder()
        folder = step_folder(self._config.run_folder, self._step)
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        statistics = {
            f"{statistic}/{name}": self._optimizer.state[parameter][statistic].cpu()
            for parameter, name in names.items()
            for statistic in statistics_of(self._optimizer, parameter)
            if self._step
        }

        def write_extra(temp: Path) -> None:
            write_tensors(temp / shard_name("optimizer", 0, 1), statistics)
            (temp / SETTINGS).write_text(to_toml(self._config))
            (temp / CLASSES).write_text(json.dumps(self._images.classes, ensure_ascii=False))
            Progress(self._step, self._step, shards_fingerprint=self._images.fingerprint).write(temp)

        weights = {name: weight.detach().cpu() for name, weight in self._model.state_dict().items()}
        write_checkpoint(folder, self._config.model, weights, None, write_extra)
        prune(folder, KEPT)

    def _checkpoint(self) -> Path | None:
        """The newest valid checkpoint of this run; None: it has none."""
        folder = self._config.run_folder
        if not (folder / SETTINGS).is_file():
            if folder.exists() and any(folder.iterdir()):
                raise ConfigError(f"{folder}: exists and is not a run folder (no {SETTINGS}); choose another run.name")
            return None
        self._require_same_settings(folder)
        if not step_folders(folder):
            return None
        checkpoint = find_checkpoint(folder)
        self._require_same_settings(checkpoint)  # it may have been copied from another run
        if Progress.read(checkpoint).shards_fingerprint != self._images.fingerprint:
            raise DataError(
                f"{checkpoint}: was trained on other images than {self._images.name}; choose another run.name"
            )
        return checkpoint

    def _require_same_settings(self, folder: Path) -> None:
        changed = differences(load_config(VisionTrainConfig, folder / SETTINGS), self._config)
        if changed := [line for line in changed if not line.startswith(MAY_CHANGE)]:
            lines = [f"{folder}: this run has other settings; choose another run.name or undo the change", *changed]
            raise ConfigError("\n".join(lines))

    def _restore(self, checkpoint: Path) -> int:
        """Set the state of the optimizer; returns the step."""
        step, stored = Progress.read(checkpoint).step, StoredTensors(checkpoint, "optimizer")
        for name, parameter in self._model.named_parameters():
            statistics = statistics_of(self._optimizer, parameter)
            state = {statistic: stored[f"{statistic}/{name}"].to(self._device) for statistic in statistics if step}
            if "exp_avg" in state:
                state["step"] = torch.tensor(float(step), device=self._device)
            self._optimizer.state[parameter] = state
        return step


class _StoppedError(Exception):
    """An evaluation was stopped."""


def initial_model(config: VisionTrainConfig) -> TostVision:
    """The model with its first weights: drawn at random, or those of `train.initial_weights`.

    Raises:
        CheckpointError: there is no such model.
        ConfigError: it has another shape.
    """
    model = TostVision(config.model)
    if (source := config.train.initial_weights) is None:
        return model
    trained = load_vision(source)
    pairs = {name: (getattr(trained.config, name), getattr(config.model, name)) for name in SAME}
    if other := [
        f"model.{name}: {theirs} there, {ours} here" for name, (theirs, ours) in pairs.items() if theirs != ours
    ]:
        raise ConfigError("\n".join([f"train.initial_weights {source}: has another shape; change [model]", *other]))
    weights = trained.state_dict()
    if trained.config.classes != config.model.classes:
        print(f"the head of {source} has {trained.config.classes} classes; a head of {config.model.classes} is drawn")
        weights |= {f"head.{name}": weight for name, weight in model.head.state_dict().items()}
    model.load_state_dict(weights)
    return model


def stored_classes(checkpoint: Path) -> list[str]:
    """The names of the classes of a checkpoint. Raises CheckpointError if it has none."""
    try:
        return json.loads((checkpoint / CLASSES).read_text())
    except OSError:
        raise CheckpointError(f"{checkpoint}: has no {CLASSES}; fine-tune it with tost vision train first") from None


def _check_classes(config: VisionTrainConfig, images: Images, held_out: Images) -> None:
    if images.classes != held_out.classes:
        raise DataError(f"{held_out.name}: has other classes than {images.name}; give both splits the same ones")
    if config.model.classes != len(images.classes):
        raise ConfigError(
            f"{images.name}: {len(images.classes)} classes, and model.classes is {config.model.classes}; set "
            f"model.classes={len(images.classes)}"
        )
