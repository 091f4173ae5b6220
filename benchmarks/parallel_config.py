"""Settings and names of `benchmarks.parallel` and its cells."""

from typing import Any

from pydantic import Field, PositiveInt

from benchmarks import measure
from tost_lm.config import Section

OURS, RING, ULYSSES, LASP2 = "TSSA, tost_lm", "Ring Attention", "DeepSpeed Ulysses", "LASP-2"
NO_AXIS, DATA, SEQUENCE, TENSOR = "none", "data", "sequence", "tensor"


class TrafficConfig(Section):
    """The layer whose traffic is counted: one sequence on several ranks; the defaults are those of tost-base."""

    tokens: list[PositiveInt] = Field(default=[1024, 16384, 65536, 1048576], min_length=1)
    """Lengths of the sequence."""
    ranks: list[PositiveInt] = Field(default=[4, 8], min_length=1)
    """Numbers of sequence ranks."""
    heads: int = Field(default=12, gt=0)
    """Heads of the layer."""
    channels: int = Field(default=64, gt=0)
    """Channels of a head."""
    count_up_to: int = Field(default=16384, ge=0)
    """Tokens up to which our traffic is counted on real ranks; beyond it follows from the formula."""


class ScalingConfig(measure.ModelShape):
    """The trained model, and the measurements."""

    ranks: list[PositiveInt] = Field(default=[1, 2, 4], min_length=1)
    """Ranks along one axis; the other axes have 1."""
    tokens: int = Field(default=2048, gt=0)
    """Tokens per rank: of its own sequence (data), or of a sequence that grows with the ranks (sequence, tensor)."""
    rounds: int = Field(default=15, gt=0)
    """Timed steps of each kind, in turns."""


class ParallelBenchmarkConfig(Section):
    """Settings of `benchmarks.parallel`."""

    traffic: TrafficConfig = Field(default_factory=TrafficConfig)
    scaling: ScalingConfig = ScalingConfig(layers=2, heads=4, width=256, vocab_size=256)


def model_settings(shape: ScalingConfig) -> dict[str, Any]:
    """Settings of a model that reads sequences of any length."""
    settings = shape.model_dump(include={"layers", "heads", "width", "vocab_size"})
    return {"pattern": "T", "positions": "sinusoidal", "denom_bias": "head", **settings}
