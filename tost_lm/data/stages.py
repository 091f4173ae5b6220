"""The stages of a run as its checkpoints record them: what each has read, from which step on. No torch, no NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict, with_config

Packing = Literal["concatenated", "best-fit"]


@with_config(ConfigDict(extra="forbid", strict=True))
@dataclass(frozen=True)
class StageSource:
    """A shard folder of a stage."""

    folder: str
    fingerprint: str
    weight: float
    """Its fraction of the samples."""
    tokens: int
    """Tokens of its training split."""


@with_config(ConfigDict(extra="ignore", strict=True))  # records of 0.1.0 have `rewound_from`
@dataclass(frozen=True)
class StageRecord:
    """A part of a run, up to the next stage or to the newest step."""

    name: str
    first_step: int
    """Steps of the run before it."""
    sources: tuple[StageSource, ...]
    """In the order of their fingerprints."""
    seq_len: int
    packing: Packing
    global_batch_size: int
    warmup_steps: int = 0
    schedule_from: int = 0
    """Steps of the run before its schedule: first_step, or less in a record of 0.1.0 that goes on with a schedule."""
    settings: dict[str, Any] = field(default_factory=dict)
    """All settings that identify what is trained."""

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch_size * self.seq_len

    @property
    def samples(self) -> tuple[object, ...]:
        """The identity of the samples: stages with equal ones read on, one after the other."""
        return tuple((source.fingerprint, source.weight) for source in self.sources), self.seq_len, self.packing


def steps_of(stages: Sequence[StageRecord], step: int) -> list[tuple[StageRecord, int]]:
    """Each stage with its number of steps, in a run of `step` steps."""
    ends = [stage.first_step for stage in stages[1:]] + [step] * bool(stages)
    return [(stage, end - stage.first_step) for stage, end in zip(stages, ends, strict=True)]


def tokens_of(stages: Sequence[StageRecord], step: int) -> int:
    """Training tokens of a run of `step` steps."""
    return sum(stage.batch_tokens * steps for stage, steps in steps_of(stages, step))


def phases(stages: Sequence[StageRecord], step: int) -> list[tuple[StageRecord, int]]:
    """Each range of stages with the same samples: its first stage, and the number of its samples before step `step`."""
    found: list[tuple[StageRecord, int]] = []
    for stage, steps in steps_of(stages, step):
        samples = steps * stage.global_batch_size
        if found and found[-1][0].samples == stage.samples:
            found[-1] = (found[-1][0], found[-1][1] + samples)
        else:
            found.append((stage, samples))
    return found


def passes(stages: Sequence[StageRecord], step: int) -> dict[str, float]:
    """How often the tokens of each folder were read, on average, in a run of `step` steps."""
    read: dict[str, float] = {}
    for stage, steps in steps_of(stages, step):
        for source in stage.sources:
            times = source.weight * steps * stage.batch_tokens / source.tokens
            read[source.folder] = read.get(source.folder, 0.0) + times
    return read
