"""Settings of `tost eval positions`."""

from pydantic import Field

from tost_lm.config import Section
from tost_lm.evaluation.config import RanksConfig, TextConfig
from tost_lm.parallel.config import LaunchConfig

POSITIONS = "positions"
"""Name of the protocol. A changed protocol gets a new name."""


class SequencesConfig(Section):
    """Protocol `positions`."""

    times: int = Field(default=16, gt=0)
    """Sequence length as a multiple of model.max_positions; the model's positions limit it."""
    sequences: int = Field(default=8, gt=0)
    """Maximum number of sequences."""


class PositionsConfig(Section):
    """Settings of `tost eval positions`."""

    positions: SequencesConfig = Field(default_factory=SequencesConfig)
    heldout: TextConfig = Field(default_factory=TextConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)
