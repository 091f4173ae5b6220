"""What executed ranks send and hold, whether the collectives of all ranks match, and the plan beside them."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from tost_lm.parallel.agreement import rank_numbers
from tost_lm.training import plan
from tost_lm.training.plan_config import PlanConfig

AXES = ("rank", "tensor", "sequence", "data", "replicas", "world")
"""The groups of a rank; `rank` is itself alone."""
FEW_NUMBERS_BYTES = 16
"""Up to so many: label counts, losses and norms of a step, which the plan does not count."""
_LONGEST_LOOP = 64


class Message(NamedTuple):
    """A collective of a rank."""

    kind: str
    """As in `plan.Collectives`; others as torch names them."""
    axis: str
    """The group: one of `AXES`."""
    bytes: int
    """Size of the tensors that the rank passes to it."""
    rows: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Of an all-to-all: rows for each rank of the group, and rows from each."""

    def __str__(self) -> str:
        return f"{self.kind} over {self.axis} of {self.bytes:,} bytes"


class ExecutedClass(NamedTuple):
    """Ranks whose tensors have equal shapes. The first of them ran."""

    ranks: tuple[int, ...]
    messages: tuple[Message, ...]
    """In order."""
    peak: dict[str, int]
    """Bytes of live tensors at their peak, by use."""


class RankLayout(NamedTuple):
    """Ranks = tensor × sequence × data; tensor varies fastest, then sequence."""

    tensor: int
    sequence: int
    world: int

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.sequence)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Tensor, sequence and data rank."""
        return rank % self.tensor, rank // self.tensor % self.sequence, rank // (self.tensor * self.sequence)

    def group(self, axis: str, rank: int) -> range:
        """The ranks of this rank's group."""
        block = self.tensor * self.sequence
        tensor, _, data = self.coordinates(rank)
        return {
            "rank": range(rank, rank + 1),
            "tensor": range(rank - tensor, rank - tensor + self.tensor),
            "sequence": range(data * block + tensor, (data + 1) * block, self.tensor),
            "data": range(rank % block, self.world, block),
            "replicas": range(tensor, self.world, self.tensor),
            "world": range(self.world),
        }[axis]

    def axis_of(self, ranks: Sequence[int], rank: int) -> str:
        """The first axis whose group of `rank` has these ranks."""
        return next(axis for axis in AXES if tuple(self.group(axis, rank)) == tuple(ranks))

    def groups(self, axis: str) -> Iterator[range]:
        """All groups of an axis."""
        return (group for rank in range(self.world) if (group := self.group(axis, rank))[0] == rank)


def mismatch(classes: Sequence[ExecutedClass], layout: RankLayout) -> str | None:
    """The first collective in which ranks of a group do not match: in kind, in size, in the rows of an all-to-all, or
    because one of them has fewer. None: in every group of all ranks they match, in order."""
    class_of = [0] * layout.world
    for number, one in enumerate(classes):
        for rank in one.ranks:
            class_of[rank] = number
    for axis in AXES[1:]:
        of_classes = [[message for message in one.messages if message.axis == axis] for one in classes]
        checked = set()
        for group in layout.groups(axis):
            numbers = tuple(class_of[rank] for rank in group)
            if numbers in checked:
                continue
            checked.add(numbers)
            for place, messages in enumerate(zip_longest(*(of_classes[number] for number in set(numbers)))):
                of_class = dict(zip(set(numbers), messages, strict=True))
                if pair := _unequal([of_class[number] for number in numbers]):
                    first, second = (f"{of_class[numbers[i]] or 'missing'} on rank {group[i]}" for i in pair)
                    return f"{axis} group of ranks {rank_numbers(group)}: collective {place + 1} is {first}, {second}"
    return None


def _unequal(messages: Sequence[Message | None]) -> tuple[int, int] | None:
    """Two places in a group whose messages do not match."""
    first = messages[0]
    for place, other in enumerate(messages):
        if first is None or other is None or (first.kind, first.rows is None) != (other.kind, other.rows is None):
            if first != other:
                return 0, place
        elif first.rows is None and first.bytes != other.bytes:
            return 0, place
    rows = [message.rows for message in messages if message and message.rows]
    if not rows or (len({*rows}) == 1 and rows[0][0] == rows[0][1] and len({*rows[0][0]}) == 1):
        return None
    # Rows for rank s of rank r are those from rank r of rank s.
    sent_RR, received_RR = (np.array([of_rank[i] for of_rank in rows]) for i in (0, 1))
    different = np.argwhere(sent_RR != received_RR.T)
    return (int(different[0][0]), int(different[0][1])) if len(different) else None


class Comparison(NamedTuple):
    """Messages of one kind in groups of one shape, in bytes of a rank, on average over all ranks."""

    kind: str
    ranks: int
    stride: int
    planned: float
    executed: float

    @property
    def is_equal(self) -> bool:
        return math.isclose(self.planned, self.executed, rel_tol=1e-12)


def beside_plan(config: PlanConfig, classes: Sequence[ExecutedClass], layout: RankLayout) -> list[Comparison]:
    """Planned and executed bytes, without messages of at most `FEW_NUMBERS_BYTES`."""
    executed, planned = Counter[tuple[str, int, int]](), Counter[tuple[str, int, int]]()
    for one in classes:
        for message in one.messages:
            if message.axis != "rank" and (message.bytes > FEW_NUMBERS_BYTES or message.rows):
                group = layout.group(message.axis, 0)
                executed[message.kind, len(group), group.step] += message.bytes * len(one.ranks)
    for one in plan.collectives(config):
        planned[one.kind, one.ranks, one.stride] += one.input_bytes  # pyright: ignore[reportArgumentType]
    return [
        Comparison(*key, planned=planned[key], executed=executed[key] / layout.world)
        for key in sorted({*planned, *executed})
    ]


def in_loops(messages: Sequence[Message]) -> list[tuple[int, tuple[Message, ...]]]:
    """The same sequence as (repetitions, messages): a model's layers repeat theirs."""
    found, start = [], 0
    while start < len(messages):
        count, period = 1, 1
        for length in range(1, _LONGEST_LOOP + 1):
            body, times = messages[start : start + length], 1
            while messages[start + times * length : start + (times + 1) * length] == body:
                times += 1
            if times > 1 and times * length > count * period:
                count, period = times, length
        found.append((count, tuple(messages[start : start + period])))
        start += count * period
    return found
