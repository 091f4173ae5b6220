"""Settings of `tost eval contamination`."""

from pathlib import Path

from pydantic import Field

from tost_lm.config import Section
from tost_lm.evaluation.zero_shot_config import DataSetsConfig


class OverlapConfig(Section):
    """Where the training text is read and the result is written."""

    output: Path | None = None
    """New file of JSON lines with every example that overlaps; unset: only the largest overlaps are printed."""
    workers: int | None = Field(default=None, gt=0)
    """Number of processes; unset: all cores. The result does not depend on it."""


class ContaminationConfig(Section):
    """Settings of `tost eval contamination`."""

    contamination: OverlapConfig = Field(default_factory=OverlapConfig)
    sets: DataSetsConfig = Field(default_factory=DataSetsConfig)


def protocol_of(data_set: str) -> str:
    """The name of the result of a test set."""
    return f"contamination@{data_set}"
