"""Accuracy of an image classifier on a split."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tost_lm.extra.vision.classifier import TostVision
from tost_lm.extra.vision.images import Images, Transform, batches, checked

TOP = 5

Accuracy = dict[str, Any]
"""`top1`, `top5` (with 5 classes or more) and `nats` per image, each with `…_standard_error`; `examples`."""


@torch.inference_mode()
def measure_accuracy(
    model: TostVision,
    images: Images,
    transform: Transform,
    batch_size: int,
    workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Accuracy:
    """The accuracy of a model in evaluation mode; `progress` is called after each batch. Raises DataError."""
    device, found = next(model.parameters()).device, list[Tensor]()
    loader = batches(images, transform, batch_size, workers, np.arange(len(images)))
    for pixels, labels in checked(loader):
        log_probs_BK = model(pixels.to(device)).double().log_softmax(-1).cpu()
        right_B1 = log_probs_BK.gather(1, labels[:, None])
        # Of K classes, so many must be below the right one. Ties and NaN count as wrong.
        below_B, K = (log_probs_BK < right_B1).sum(1), log_probs_BK.shape[1]
        found.append(torch.stack([below_B >= K - 1, below_B >= K - TOP, -right_B1[:, 0]], 1))
        progress(sum(map(len, found)), len(images))
    measured_N3 = torch.cat(found)
    result: Accuracy = {"examples": len(measured_N3)}
    for name, values_N in zip(("top1", f"top{TOP}", "nats"), measured_N3.T, strict=True):
        if name != f"top{TOP}" or len(images.classes) >= TOP:
            result[name] = values_N.mean().item()
            result[f"{name}_standard_error"] = (values_N.std(unbiased=False) / math.sqrt(len(values_N))).item()
    return result


def in_words(result: Accuracy) -> str:
    """The accuracies with their standard errors."""
    shown = [f"top-{name[3:]} {result[name]:.2%} ± {result[f'{name}_standard_error']:.2%}" for name in result
             if name.startswith("top") and not name.endswith("error")]  # fmt: skip
    return f"{', '.join(shown)}, {result['nats']:.4f} nats, {result['examples']:,} images"
