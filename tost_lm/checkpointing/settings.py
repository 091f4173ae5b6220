"""Checkpoints: what they contain, how they are written, kept and read, and their settings."""

from pydantic import Field

from tost_lm.config import Section


class CheckpointConfig(Section):
    """Interval and retention of checkpoints; nothing here changes the result of training."""

    interval: int = Field(default=1000, gt=0)
    """Steps between checkpoints; the last step always writes one."""
    keep_latest_k: int = Field(default=3, gt=0)
    """Number of newest checkpoints to keep, in addition to the one with the lowest validation loss."""
    retain_interval: int | None = Field(default=None, gt=0)
    """Checkpoints at multiples of this many steps are kept forever."""
    asynchronous: bool = True
    """Write in the background from a copy in host memory (async save); otherwise training waits."""
