"""Settings of AdamW and its learning-rate schedule."""

from pydantic import Field, model_validator

from tost_lm.config import Section


class OptimConfig(Section):
    """AdamW with linear warm-up and cosine decay; the defaults are the paper's recipe."""

    lr: float = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=6e-5, ge=0)
    """Learning rate at the last step."""
    warmup_steps: int = Field(default=2000, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices (not of temp, denom_bias, norms, LayerScale and biases)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the gradient's running mean."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the squared gradient's running mean."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""

    @model_validator(mode="after")
    def _rate_falls(self) -> "OptimConfig":
        if self.min_lr > self.lr:
            raise ValueError(f"optim.min_lr {self.min_lr:g} is above optim.lr {self.lr:g}: lower it")
        return self
