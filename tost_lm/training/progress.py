"""How far a run is: what a checkpoint records beside weights and optimizer, as training.json."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tost_lm.errors import CheckpointError

FILE_NAME = "training.json"


@dataclass(frozen=True)
class Progress:
    """After a step, the same on every rank."""

    step: int
    """Batches behind; the next step reads batch `step`."""
    updates: int
    """Of these, the ones that the optimizer applied; the rest was skipped."""
    skipped_in_a_row: int = 0
    """The newest batches, when they were skipped."""
    recent: tuple[tuple[float, float], ...] = ()
    """(loss, gradient norm) of the newest applied steps, oldest first, for those that judge the next by them."""
    validation_loss: float | None = None
    """The newest measured, in nats per token."""
    wandb_run_id: str = ""
    """Known to rank 0, which writes it down."""
    shards_fingerprint: str = ""
    tokenizer_sha256: str = ""

    def write(self, folder: Path) -> None:
        """Into a checkpoint folder. Floats come back to the bit."""
        (folder / FILE_NAME).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> "Progress":
        """Of a checkpoint folder. Raises CheckpointError when it was written by another version."""
        path = folder / FILE_NAME
        try:
            fields = json.loads(path.read_text())
            fields["recent"] = tuple(tuple(pair) for pair in fields["recent"])
            return cls(**fields)
        except (OSError, ValueError, KeyError, TypeError):
            raise CheckpointError(f"{path}: not what this version writes; begin a run of another run.name") from None
