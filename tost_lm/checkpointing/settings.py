"""Checkpoints: what they contain, how they are written, kept and read, and their settings."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from tost_lm.config import TAKES_URLS, Section
from tost_lm.remote import RemotePath


class CheckpointConfig(Section):
    """Interval and retention of checkpoints; nothing here changes the result of training."""

    interval: int = Field(default=1000, gt=0)
    """Steps between checkpoints; the last step always writes one."""
    keep_latest_k: int = Field(default=3, gt=0)
    """Number of newest checkpoints to keep, in addition to the one with the lowest validation loss."""
    retain_interval: int | None = Field(default=None, gt=0)
    """Checkpoints at multiples of this many steps are kept forever."""
    upload: Annotated[Path | None, TAKES_URLS] = None
    """Upload every checkpoint in the background, to UPLOAD/NAME of the run's name at a URL (s3://bucket/runs), with the same retention. A launch fetches the newest one there unless the run folder has one that is not older. A launch takes the URL over from an earlier one, which then ends."""

    @field_validator("upload")
    @classmethod
    def _is_url(cls, upload: Path | None) -> Path | None:
        if upload and not isinstance(upload, RemotePath):
            raise ValueError(f"checkpoint.upload {upload}: not a URL; write it as s3://bucket/folder")
        return upload
