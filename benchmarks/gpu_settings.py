"""The settings of `benchmarks.gpu`."""

from typing import Literal

from pydantic import Field, PositiveInt

from benchmarks import measure
from tost_lm.config import Section

PARTS = (
    "device", "softmax layer", "operator", "packed training step", "compiled training step", "operator tests",
    "training step", "loss", "bfloat16 against float32", "tile by tile", "decoding", "linear attention",
)  # fmt: skip


class GpuSection(Section):
    """Device and time."""

    budget_minutes: float = Field(default=8.0, gt=0)
    """No measurement begins after this time [minutes]."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu runs everything on the processor, to try the program with small sizes."""
    parts: list[Literal[PARTS]] = Field(default=list(PARTS), min_length=1)  # pyright: ignore[reportInvalidTypeForm]
    """Parts to measure; earlier results of the others are kept. Use it after an error that made the device unusable."""


class LengthsSection(Section):
    """Sizes of the measured calls."""

    operator: list[PositiveInt] = Field(default=[1024, 131072, 1048576], min_length=1)
    """Tokens of a sequence of the operator and its rivals."""
    training: list[PositiveInt] = Field(default=[1024, 8192], min_length=1)
    """Tokens of a sequence of a training step. The shortest is also the length of packed samples."""
    tiled: list[PositiveInt] = Field(default=[131072, 1048576], min_length=1)
    """Tokens of the one sequence of a step tile by tile."""
    tile_tokens: int = Field(default=16384, gt=0)
    """Tokens of a tile."""
    batch_tokens: int = Field(default=12288, gt=0)
    """Tokens of a call of operator or loss and of a training step, in as many sequences as fit, at least one."""
    precision_steps: int = Field(default=200, gt=0)
    """Steps of training in bfloat16 and in float32."""
    decoded: int = Field(default=64, gt=0)
    """Decoded tokens."""


class GpuBenchmarkConfig(Section):
    """Settings of `benchmarks.gpu`."""

    gpu: GpuSection = GpuSection()
    shape: measure.ModelShape = measure.ModelShape()
    lengths: LengthsSection = LengthsSection()
