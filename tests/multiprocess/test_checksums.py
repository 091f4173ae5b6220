"""A flipped bit in weights or optimizer state is found where promised, by name; an undamaged run reports nothing."""

import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from engine_state import whole_state
from torch import Tensor
from training_on_layouts import build_engine, restore, train_steps

from tost_lm.config import validate
from tost_lm.errors import CorruptionError
from tost_lm.parallel.agreement import name_ranks
from tost_lm.parallel.checksums import Checksums, bit_sum
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.testing import run_on_ranks

HOST = socket.gethostname()
KINDS = ("weights", "exp_avg", "exp_avg_sq")
FLIPS = 2  # of each kind

Case = tuple[int, bool, dict[str, Any]]
"""Stage, whether in bfloat16, and the engine."""


class Flip(NamedTuple):
    """A flip of one bit of an engine's own state on one rank; all ranks have the same."""

    rank: int
    what: str
    element: int
    bit: int

    def apply(self, engine: Any) -> None:
        """And once more, to undo it."""
        if dist.get_rank() == self.rank:
            words = dict(engine.own_state())[self.what].view(-1).view(torch.int32)
            words[self.element] ^= -(2**31) if self.bit == 31 else 2**self.bit


class Errors(NamedTuple):
    """Messages of one rank in one case; empty: none."""

    in_undamaged_steps: str
    after_flips: list[tuple[Flip, str]]


def drill(tensor: int, case: Case) -> Errors:
    """Five steps, the second of them skipped and the last two after a restore; flips between steps, and in one."""
    stage, bfloat16, settings = case
    layout = validate(ParallelConfig, {"tensor": tensor, "zero_stage": stage, **settings}, "test")
    engine, random = build_engine(layout, "adamw", bfloat16=bfloat16), torch.Generator().manual_seed(stage)
    checksums = Checksums(engine, interval=2)
    undamaged = take_step(engine, checksums, 0) + take_step(engine, checksums, 1, skip=True)

    flips = [draw(engine, kind, random) for kind in KINDS for _ in range(FLIPS)]
    errors = [(flip, error_between_steps(engine, checksums, flip)) for flip in flips]
    flip = draw(engine, KINDS[stage - 1], random)
    if not is_replicated(engine):
        errors.append((flip, take_step(engine, checksums, 2, flip)))

    state = whole_state(engine)
    engine = build_engine(layout, "adamw", bfloat16=bfloat16)
    restore(engine, state, step=2)
    checksums = Checksums(engine, interval=2)
    undamaged += take_step(engine, checksums, 3) + take_step(engine, checksums, 4)
    if is_replicated(engine):
        [(name, _), *_] = engine.own_state()
        flip = Flip(dist.get_world_size() - 1, name, element=5, bit=22)
        flip.apply(engine)
        errors.append((flip, take_step(engine, checksums, 5)))
    return Errors(undamaged, errors)


def is_replicated(engine: Any) -> bool:
    return engine.replicated_part is not None


def draw(engine: Any, kind: str, random: torch.Generator) -> Flip:
    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=random))

    tensors = [(what, x) for what, x in engine.own_state() if what.startswith(f"{kind} of ")]
    if kind == KINDS[0]:
        tensors = [(what, x) for what, x in engine.own_state() if " of " not in what]
    what, x = tensors[number(len(tensors))]
    return Flip(number(dist.get_world_size()), what, number(x.numel()), number(32))


def error_of(look: Callable[[], None]) -> str:
    try:
        look()
    except CorruptionError as error:
        return str(error)
    return ""


def error_between_steps(engine: Any, checksums: Checksums, flip: Flip) -> str:
    flip.apply(engine)
    if is_replicated(engine):
        assert error_of(checksums.before_update) == error_of(lambda: checksums.after_update(3)) == ""
        found = error_of(lambda: checksums.after_update(4))
    else:
        found = error_of(checksums.before_update)
    assert error_of(checksums.check) == found
    flip.apply(engine)
    assert error_of(checksums.check) == ""
    return found


def take_step(engine: Any, checksums: Checksums, step: int, flip: Flip | None = None, skip: bool = False) -> str:
    """The error messages of a step. A flip comes before it and is undone before the update, so that all ranks can
    continue; a step is skipped because a gradient is not finite."""
    messages, apply_update, before = [], engine.update, copies(engine)

    def watched_step(*arguments: Any) -> float:
        messages.append(error_of(checksums.before_update))
        if flip:
            flip.apply(engine)
        return apply_update(*arguments)

    if flip:
        flip.apply(engine)
    hook = engine.module.norm.register_full_backward_hook(lambda module, dx, dy: (dx[0] * (torch.inf if skip else 1),))
    engine.update = watched_step
    train_steps(engine, "adamw", range(step, step + 1))
    engine.update = apply_update
    hook.remove()
    after = copies(engine)
    assert flip or skip == all(torch.equal(x, after[what]) for what, x in before.items())
    messages.append(error_of(lambda: checksums.after_update(step + 1)))
    assert len(messages) == 2
    return "".join(messages)


def copies(engine: Any) -> dict[str, Tensor]:
    return {what: x.clone() for what, x in engine.own_state()}


def drills(tensor: int, cases: list[Case]) -> list[Errors]:
    return [drill(tensor, case) for case in cases]


@pytest.mark.parametrize(
    ("ranks", "tensor", "cases"),
    [
        pytest.param(1, 1, [(0, False, {})], marks=pytest.mark.quick),
        (2, 1, [(1, True, {}), (1, True, {"engine": "deepspeed"})]),
        pytest.param(2, 1, [(stage, False, {}) for stage in range(4)], marks=pytest.mark.slow),
        pytest.param(2, 1, [(stage, False, {"engine": "deepspeed"}) for stage in (1, 2, 3)], marks=pytest.mark.slow),
        pytest.param(4, 1, [(0, False, {})], marks=pytest.mark.slow),
        pytest.param(4, 2, [(0, False, {}), (3, False, {})], marks=pytest.mark.slow),
        pytest.param(8, 2, [(stage, False, {"shard_ranks": 2}) for stage in (1, 3)], marks=pytest.mark.slow),
    ],
)
def test_every_flipped_bit_is_found_and_named(ranks: int, tensor: int, cases: list[Case]):
    results = run_on_ranks(drills, ranks, tensor, cases)
    for (stage, _, settings), *results_by_rank in zip(cases, *results, strict=True):
        assert [found.in_undamaged_steps for found in results_by_rank] == [""] * ranks
        everything = list(zip(*(found.after_flips for found in results_by_rank), strict=True))
        assert len(everything) == 3 * FLIPS + 1
        for reports in everything:
            [flip], messages = {flip for flip, _ in reports}, [message for _, message in reports]
            part = tensor * settings.get("shard_ranks", 1)
            who, replicas = f"rank {flip.rank} ({HOST})", range(flip.rank % part, ranks, part)
            has_copies = len(replicas) > 1 and (stage == 0 or "shard_ranks" in settings)
            if has_copies and len(replicas) == 2:
                who = f"one of {name_ranks(replicas, [HOST] * ranks)}, which have no majority"
            expected = (
                f"silent data corruption on {who}: {flip.what}; test that machine's memory, and run the same command"
            )
            assert messages[flip.rank].startswith(expected), (flip, messages)
            if has_copies:
                assert len(set(messages)) == 1
            else:
                assert sum(map(bool, messages)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_counts_wherever_a_tensor_lies(dtype: torch.dtype):
    memory = torch.full((12,), torch.nan, dtype=dtype)
    for start in range(5):
        for length in range(8):
            x = memory[start : start + length]
            octets, before = x.view(torch.uint8), bit_sum(x)
            for octet in range(len(octets)):
                for bit in range(8):
                    octets[octet] ^= 1 << bit
                    assert bit_sum(x) != before
                    octets[octet] ^= 1 << bit
            assert bit_sum(x) == before
