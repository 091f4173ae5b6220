"""Learning-rate schedules: a linear warm-up, then cosine, linear, constant or stable and decay (WSD)."""

import math

from tost_lm.optim.config import OptimConfig


def warmup_steps(config: OptimConfig, steps: int) -> int:
    """Warm-up steps of a run of `steps` steps."""
    return min(2000, steps // 10) if config.warmup_steps is None else config.warmup_steps


def steps_before_decay(config: OptimConfig, steps: int) -> int:
    """How many steps of a run of `steps` steps have rates that do not depend on its length, given its warm-up."""
    match config.schedule:
        case "constant":
            return steps
        case "wsd":
            return steps - (config.decay_steps or 0)
        case _:
            return warmup_steps(config, steps)


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of step `step` (from 0) of a run of `steps` steps: linear warm-up to `lr`, then the schedule."""
    warmup, stable = warmup_steps(config, steps), steps_before_decay(config, steps)
    if step < warmup:
        return config.lr * (step / warmup if config.warmup_from_zero else (step + 1) / (warmup + 1))
    if config.schedule == "constant" or (config.schedule == "wsd" and step < stable):
        return config.lr
    if config.schedule == "wsd":
        falling = (steps - 1 - step) / (steps - stable)
    else:
        done = min((step - warmup) / max(1, steps - 1 - warmup), 1.0)
        falling = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.min_lr + falling * (config.lr - config.min_lr)


def obstacle_to_schedule(config: OptimConfig, steps: int) -> str:
    """Why a run of `steps` steps cannot have this schedule; empty: it can."""
    warmup, stable = warmup_steps(config, steps), steps_before_decay(config, steps)
    if config.schedule != "wsd" or stable >= warmup:
        return ""
    return (
        f"optim.decay_steps {config.decay_steps} and a warm-up of {warmup} steps are more than train.steps {steps}: "
        "lower optim.decay_steps or raise train.steps"
    )
