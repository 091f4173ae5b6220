"""Numbers that are not finite are skipped by all ranks alike; bits that flip in memory end the run."""

import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from launches import launch
from test_stopped_runs import curve, saved_steps

from tost_lm.files import read_rows
from tost_lm.parallel import zero
from tost_lm.training import loop

Times = Callable[[int], int]
Survived = Callable[[str, int, str], None]


def before_step(number: int, fault: Callable[[Any], None]) -> None:
    """Let `fault(engine)` happen in this rank right before training step `number`, counted from 1 in this launch."""
    train_step, steps = loop.train_step, 0

    def step(engine: Any, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == number:
            fault(engine)
        return train_step(engine, *arguments)

    loop.train_step = step  # pyright: ignore[reportAttributeAccessIssue]


def infinite_loss(engine: Any) -> None:
    def spoil(module: Any, arguments: Any, output: Any) -> Any:
        handle.remove()
        return (output[0] * math.inf, *output[1:])

    handle = engine.module.head.register_forward_hook(spoil)


def infinite_gradient(engine: Any) -> None:
    def spoil(module: Any, dx: Any, dy: Any) -> Any:
        handle.remove()
        return (dx[0] * math.inf,)

    handle = engine.module.norm.register_full_backward_hook(spoil)


def flipped_bit(kind: str, bit: int, engine: Any) -> None:
    x = next(tensor for what, tensor in zero.own_state(engine) if what.startswith(kind))
    x.view(torch.int32).view(-1)[7] ^= 1 << bit if bit < 31 else -(1 << 31)


def strike(at_rank: int, number: int, fault: Callable[[Any], None], rank: int) -> None:
    if rank == at_rank:
        before_step(number, fault)


def test_one_rank_s_infinities_are_skipped_by_all(workplace: Path, times: Times, survived: Survived):
    for count in range(times(5)):
        for fault, says in ((infinite_loss, "loss is "), (infinite_gradient, "gradient norm is ")):
            name, struck = f"{fault.__name__}{count}", 2 + count % 7
            words = (f"run.name={name}", "train.steps=10", f"parallel.zero_stage={count % 4}")
            with launch(workplace, 2, *words, inject=partial(strike, count % 2, struck, fault)) as running:
                assert running.wait() == [0, 0], running.said()
            (skipped,) = [
                row for row in read_rows(workplace / f"runs/{name}/events.jsonl") if row["event"] == "skipped"
            ]
            assert skipped["step"] == struck
            assert skipped["samples"] == [4 * (struck - 1), 4 * struck - 1]
            assert skipped["why"].startswith(says)
            rows = curve(workplace / f"runs/{name}")
            assert len(rows) == 10
            assert all(row[1] is not None and math.isfinite(row[1]) for row in rows if row[0] != struck)
    survived("Inf in one rank's loss, in one rank's gradient", 2 * times(5), "all ranks skip; sample ids logged")


def always_infinite(rank: int) -> None:
    if rank == 1:
        for number in range(4, 20):
            before_step(number, infinite_loss)


def test_a_run_that_skips_everything_ends(workplace: Path):
    with launch(workplace, 2, "run.abort_after_skips=3", inject=always_infinite) as running:
        assert 2 in running.wait(), running.said()
        assert "step 6: loss is " in running.errors()[0]
        assert "3 steps in a row were skipped (run.abort_after_skips)" in running.errors()[0]


def test_a_flipped_bit_ends_the_run_and_the_restart_is_sound(
    workplace: Path, never_stopped: Path, times: Times, survived: Survived
):
    kinds = ("master weights", "exp_avg of", "exp_avg_sq of")
    for count in range(times(5)):
        stage, lost, bit = (1, 0, 3, 2, 1)[count % 5], count % 2, (7 * count + 3) % 32
        fault = partial(flipped_bit, "" if stage == 0 else kinds[count % 3], bit)
        words = (f"run.name=bits{count}", f"parallel.zero_stage={stage}", "run.check_every=2", "train.steps=30")
        with launch(workplace, 2, *words, inject=partial(strike, lost, 15, fault)) as running:
            codes = running.wait()
            assert codes == [2, 2], running.said()
            line = next(line for line in running.errors() if "memory changed by itself" in line)
            who = "one of ranks 0-1" if stage == 0 else f"rank {lost}"
            assert re.search(rf"memory changed by itself on {who} \({os.uname().nodename}\)", line), line
        assert saved_steps(workplace / f"runs/bits{count}") == [10]
        rows = read_rows(workplace / f"runs/bits{count}/metrics.jsonl")
        assert rows[-1]["step"] <= 15 + (1 if stage == 0 else -1)
        with launch(workplace, 2, *words) as running:
            assert running.wait() == [0, 0], running.said()
    survived("a bit flipped in weights or optimizer", times(5), "found before the next update (stage 0: in N steps)")
