"""Training of a small model in one process."""

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tost_lm.errors import TrainingError
from tost_lm.optim.interface import optimizer_of
from tost_lm.optim.settings import OptimConfig, learning_rate


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
