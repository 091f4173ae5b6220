"""Settings of the optimizer, and its learning-rate schedule: a linear warm-up, then cosine, linear, constant or WSD."""

import math
from typing import Literal

from pydantic import Field, model_validator

from tost_lm.config import Section


class OptimConfig(Section):
    """The optimizer and its learning-rate schedule; the defaults are the paper's recipe."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon updates the matrices of mixers and MLPs, AdamW all other parameters. Both use the same learning rate and weight decay. Needs parallel.tensor=1 and parallel.zero_stage=0."""
    lr: float = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Schedule after the warm-up: `cosine` (half a cosine) and `linear` fall from lr to min_lr over all other steps; `constant` stays at lr; `wsd` (warm-up, stable, decay) stays at lr and falls linearly over the last decay_steps."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Last steps of schedule `wsd`, in which the learning rate falls; a tenth to a fifth of the run is usual."""
    min_lr: float = Field(default=6e-5, ge=0)
    """Learning rate at the last step; without effect on schedule `constant`."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps of linear warm-up; unset: a tenth of train.steps, at most 2,000."""
    warmup_from_zero: bool = False
    """Start the warm-up at a learning rate of 0, as in nanoGPT, instead of lr / (warmup_steps + 1)."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of weight matrices. temp, denom_bias, norms, LayerScale and biases do not decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of AdamW's second moment."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Gradient clipping: largest global norm; 0: no clipping."""

    @model_validator(mode="after")
    def _rate_falls(self) -> "OptimConfig":
        if self.min_lr > self.lr and self.schedule != "constant":
            raise ValueError(f"optim.min_lr {self.min_lr:g} is above optim.lr {self.lr:g}; lower it")
        if self.schedule == "wsd" and self.decay_steps is None:
            raise ValueError("optim.schedule wsd needs the length of its decay: set optim.decay_steps")
        if self.schedule != "wsd" and self.decay_steps is not None:
            raise ValueError(
                f'optim.decay_steps is set with optim.schedule {self.schedule}: set optim.schedule = "wsd", or remove it'
            )
        return self


def warmup_steps(config: OptimConfig, steps: int) -> int:
    """Warm-up steps of a run of `steps` steps."""
    return min(2000, steps // 10) if config.warmup_steps is None else config.warmup_steps


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of step `step` (from 0) of a run of `steps` steps: linear warm-up to `lr`, then the schedule."""
    warmup, decay = warmup_steps(config, steps), config.decay_steps or 0
    if step < warmup:
        return config.lr * (step / warmup if config.warmup_from_zero else (step + 1) / (warmup + 1))
    if config.schedule == "constant" or (config.schedule == "wsd" and step < steps - decay):
        return config.lr
    if config.schedule == "wsd":
        falling = (steps - 1 - step) / decay
    else:
        done = min((step - warmup) / max(1, steps - 1 - warmup), 1.0)
        falling = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.min_lr + falling * (config.lr - config.min_lr)


def obstacle_to_schedule(config: OptimConfig, steps: int) -> str:
    """Why a run of `steps` steps cannot have this schedule; empty: it can."""
    warmup, decay = warmup_steps(config, steps), config.decay_steps or 0  # which only wsd has
    if decay == 0 or steps - decay >= warmup:
        return ""
    return (
        f"optim.decay_steps {decay} and a warm-up of {warmup} steps are more than train.steps {steps}: "
        "lower optim.decay_steps or raise train.steps"
    )
