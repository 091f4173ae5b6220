"""What the choice of the optimizer changes in a plan: bytes of its state and of checkpoints, and Muon's FLOPs."""

from tost_lm.model.flops import block_matrices, parameters
from tost_lm.training.config import PretrainConfig

ITERATIONS = 5  # of Newton and Schulz, torch's default


def muon_parameters(config: PretrainConfig) -> int:
    """Parameters that Muon updates: the optimizer keeps one number of each, and two of all others."""
    return sum(rows * columns for rows, columns in block_matrices(config.model)) if config.optim.kind == "muon" else 0


def checkpoint_bytes(config: PretrainConfig) -> int:
    """Bytes of a checkpoint, and of its copy in host memory: float32 weights and optimizer state."""
    return 12 * parameters(config.model).total - 4 * muon_parameters(config)


def muon_flops(config: PretrainConfig) -> float:
    """FLOPs of an update, on every rank: an iteration multiplies r × c by c × r, r × r by r × r and r × r by r × c."""
    if config.optim.kind != "muon":
        return 0.0
    sides = [sorted(shape) for shape in block_matrices(config.model)]
    return sum(ITERATIONS * (4.0 * r * r * c + 2 * r**3) for r, c in sides)
