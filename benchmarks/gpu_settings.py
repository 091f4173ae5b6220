"""The settings of `benchmarks.gpu`."""

from typing import Literal, NamedTuple

from pydantic import Field

from tost_lm.config import Section


class Part(NamedTuple):
    """A part of `benchmarks.gpu`."""

    limit_s: float
    """Its time limit on a GPU, its start included."""
    shows: str
    """Its results in words, for docs/cluster.md."""


PARTS = {
    "demo": Part(120, "the first commands of `make demo`: shards, training, resume, evaluation, a text"),
    "device": Part(30, "rates of copies, launches and matrix products"),
    "training step": Part(100, "a compiled step of tost-base: losses as in float32, MFU, all kernels by class"),
    "two ranks": Part(150, "ranks over NCCL in each parallel layout, with the losses of one rank; a lost rank"),
    "plain loop": Part(70, "the time of a step beside that of a plain PyTorch loop"),
    "decoding": Part(45, "the time of a decoded token"),
    "tests": Part(300, "a compiled run that is killed and resumes; waits; kernels of all operators"),
    "delta step": Part(
        400, "compiled steps of delta_350m and delta_1b with the kernels of fla-core; one beside a plain PyTorch loop"
    ),
}
"""The parts in the order in which they run."""


class GpuSection(Section):
    """Device and time."""

    budget_minutes: float = Field(default=9.5, gt=0)
    """All parts end within this time [minutes]."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu runs everything with small sizes on the processor, to try the program."""
    parts: list[Literal[tuple(PARTS)]] = Field(default=list(PARTS), min_length=1)  # pyright: ignore[reportInvalidTypeForm]
    """Parts to measure; earlier results of the others are kept."""


class GpuBenchmarkConfig(Section):
    """Settings of `benchmarks.gpu`."""

    gpu: GpuSection = GpuSection()
