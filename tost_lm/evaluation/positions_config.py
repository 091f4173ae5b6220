"""Settings of `eval.positions`."""

from pydantic import Field

from tost_lm.config import Section
from tost_lm.evaluation.config import RanksConfig, TextConfig

POSITIONS = "positions"
"""The protocol; a new version gets a new name."""


class SequencesConfig(Section):
    """Protocol `positions`."""

    times: int = Field(default=16, gt=0)
    """How long the sequences are, in model.max_positions tokens; no longer than the model reads."""
    sequences: int = Field(default=8, gt=0)
    """How many are read, or as many as the text has."""


class PositionsConfig(Section):
    """What `eval.positions` reads."""

    positions: SequencesConfig = Field(default_factory=SequencesConfig)
    heldout: TextConfig = Field(default_factory=TextConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)
