"""The progress of a run, which a checkpoint stores in training.json."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from tost_lm.errors import CheckpointError, TrainingError

FILE_NAME = "training.json"


@dataclass(frozen=True)
class Progress:
    """After a step, the same on every rank."""

    step: int
    """Steps so far; of a branch with those before it."""
    updates: int
    """Steps that the optimizer applied; the others were skipped."""
    skipped_in_a_row: int = 0
    """Steps skipped since the last applied one."""
    recent: tuple[tuple[float, float], ...] = ()
    """(loss, gradient norm) of the newest applied steps, oldest first, for the spike guard."""
    validation_loss: float | None = None
    """The newest one, in nats per token."""
    wandb_run_id: str = ""
    """Set on rank 0, which writes the file."""
    data_start: int = 0
    """The step that read batch 0 of the data. The next step reads batch `step - data_start`."""
    shards_fingerprint: str = ""
    tokenizer_sha256: str = ""

    def write(self, folder: Path) -> None:
        """Write training.json into a checkpoint folder. Floats are read back bit-exactly."""
        (folder / FILE_NAME).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> "Progress":
        """Read training.json of a checkpoint folder. Raises CheckpointError when another version wrote it."""
        path = folder / FILE_NAME
        try:
            fields = json.loads(path.read_text())
            fields["recent"] = tuple(tuple(pair) for pair in fields["recent"])
            return cls(**fields)
        except (OSError, ValueError, KeyError, TypeError):
            raise CheckpointError(f"{path}: written by another version; start a run under another run.name") from None

    def require_finite_validation(self, steps: int, run_folder: Path) -> None:
        """Raises TrainingError after the last of `steps` steps if the validation loss is not finite."""
        loss = self.validation_loss
        if self.step >= steps and loss is not None and not math.isfinite(loss):
            raise TrainingError(
                f"{run_folder}: the validation loss after the last step is {loss}, so the model is unusable; lower "
                "optim.lr and train under another run.name"
            )
