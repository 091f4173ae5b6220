"""Settings of `tost eval retrieval`."""

from pathlib import Path

from pydantic import Field, PositiveInt, field_validator

from tost_lm.config import Section
from tost_lm.evaluation.config import RanksConfig, TextConfig
from tost_lm.parallel.config import LaunchConfig

NEEDLE = "needle@words"
VARIABLE_TRACKING = "vt@own-words"
OWN_WORDS = (
    "niah_single_1@own-words",
    "niah_single_2@own-words",
    "niah_single_3@own-words",
    "niah_multikey_1@own-words",
    "niah_multikey_2@own-words",
    "niah_multikey_3@own-words",
    "niah_multivalue@own-words",
    "niah_multiquery@own-words",
    VARIABLE_TRACKING,
)
TASKS = (NEEDLE, *OWN_WORDS)
"""All tasks, in the order of tables. A changed task gets a new name."""


class RetrievalTasksConfig(Section):
    """Settings of all tasks."""

    tasks: list[str] = Field(default=[NEEDLE], min_length=1)
    """Names of tasks."""
    lengths: list[PositiveInt] = Field(default_factory=list)
    """Tokens of prompt and answer together; empty: a quarter, half and all of model.max_positions."""
    samples: int = Field(default=8, gt=0)
    """Examples per cell."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the texts, keys and values."""
    haystack: Path | None = None
    """A UTF-8 file for haystacks; default: the held-out documents, or Python's documentation if there are none."""

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: list[str]) -> list[str]:
        for name in tasks:
            if name not in TASKS:
                raise ValueError(f"retrieval.tasks: {name!r} is not a task; choose from {', '.join(TASKS)}")
        return list(dict.fromkeys(tasks))

    @field_validator("lengths")
    @classmethod
    def _remove_duplicates(cls, lengths: list[int]) -> list[int]:
        return list(dict.fromkeys(lengths))


class NeedleConfig(Section):
    """Protocol `needle@words`."""

    depths: list[float] = Field(default=[0.0, 0.25, 0.5, 0.75, 1.0], min_length=1)
    """Positions of the needle in the text before the question, from 0 (beginning) to 1 (end)."""

    @field_validator("depths")
    @classmethod
    def _check_depths(cls, depths: list[float]) -> list[float]:
        for depth in depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"needle.depths: {depth:g} is not between 0 and 1; give a fraction of the text")
        return list(dict.fromkeys(depths))


class RetrievalConfig(Section):
    """Settings of `tost eval retrieval`."""

    retrieval: RetrievalTasksConfig = Field(default_factory=RetrievalTasksConfig)
    needle: NeedleConfig = Field(default_factory=NeedleConfig)
    heldout: TextConfig = Field(default_factory=TextConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)
