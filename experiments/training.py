"""Training of a small model in one process. A stopped run resumes from a file that is written every few minutes."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tost_lm.errors import TrainingError
from tost_lm.optim.interface import optimizer_of
from tost_lm.optim.settings import OptimConfig, learning_rate

SAVE_EVERY_S = 600.0


def train(
    model: nn.Module,
    optim: OptimConfig,
    steps: int,
    loss_of: Callable[[int], Tensor],
    saved: Path | None = None,
    is_done: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Minimize `loss_of(step)`, from the state in `saved` if there is one; the file is removed at the end.

    `is_done` is asked every hundred steps and ends the training early. Without `saved`, no state is kept.

    Returns:
        The steps taken, processor seconds, and the mean losses of tenths of the training.

    Raises:
        TrainingError: a loss is not finite.
    """
    optimizer, first, losses, seconds = optimizer_of(optim).build(model, optim), 0, list[float](), 0.0
    if saved and saved.is_file():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, losses, seconds = state["step"], state["losses"], state["seconds"]
        print(f"  resuming {saved.stem} after {first:,} of {steps:,} steps", flush=True)
    began, saved_at = time.process_time() - seconds, time.monotonic()
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, optim)
        loss = loss_of(step)
        loss.backward()
        if optim.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # a tensor would keep its page of freed logits
        if not math.isfinite(losses[-1]):
            raise TrainingError(f"the loss is {losses[-1]} after {step + 1} steps; lower the learning rate")
        if (step + 1) % 100 == 0 and is_done():
            break
        if saved and time.monotonic() - saved_at > SAVE_EVERY_S:
            seconds = time.process_time() - began
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            _write(saved, {**state, "step": step + 1, "losses": losses, "seconds": seconds})
            saved_at = time.monotonic()
    seconds = time.process_time() - began
    if saved:
        saved.unlink(missing_ok=True)
    tenth = max(1, len(losses) // 10)
    means = [sum(part) / len(part) for part in (losses[i : i + tenth] for i in range(0, len(losses), tenth))]
    return {"steps": len(losses), "seconds": seconds, "training_losses": means}


def _write(path: Path, state: dict[str, Any]) -> None:
    temp = path.with_suffix(".temp")
    torch.save(state, temp)
    temp.replace(path)
