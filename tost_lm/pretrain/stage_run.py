"""Where a run stands: the stage that a launch trains, and what it starts from."""

from pathlib import Path
from typing import NamedTuple

from tost_lm.checkpointing.format import Progress
from tost_lm.data.loader import Corpora
from tost_lm.data.stages import StageRecord
from tost_lm.pretrain.settings import PretrainConfig, Stage


class InitialWeights(NamedTuple):
    """A checkpoint folder."""

    folder: Path
    manifest_sha256: str
    """Identifies the weights, because the manifest has a hash of each file."""
    progress: Progress | None = None
    """Where a branch continues; None: the run starts at step 0 with a new optimizer."""


class StageRun(NamedTuple):
    """A stage of a run, and the start of a launch in it: a checkpoint, initial weights or neither."""

    run: PretrainConfig
    """All settings of the run, with its stages."""
    stage: Stage
    """The stage that the launch trains."""
    corpora: Corpora
    """Its data."""
    records: tuple[StageRecord, ...]
    """The stages of the run so far, that one at the end."""
    resume_from: Path | None = None
    """The newest valid checkpoint; None: the run starts from step 0."""
    checkpoints: tuple[Path, ...] = ()
    """The checkpoints that the folder had when this was determined."""
    initial_weights: InitialWeights | None = None
    """Initial weights of a run that starts from step 0; None: they are drawn at random."""

    @property
    def config(self) -> PretrainConfig:
        """The settings of the stage."""
        return self.stage.config

    def with_config(self, config: PretrainConfig) -> "StageRun":
        """The same with other settings of the stage, which do not change what is trained."""
        return self._replace(stage=self.stage._replace(config=config))

    @property
    def weights_from(self) -> Path | None:
        """The checkpoint that has the first weights of the launch; None: they are drawn at random."""
        return self.resume_from or (self.initial_weights and self.initial_weights.folder)
