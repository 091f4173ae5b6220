"""All ranks skip a step that is not finite; a bit that flips in memory ends the run."""

import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import launch, no_fault
from test_stopped_runs import curve, saved_steps

from tost_lm.files import read_rows
from tost_lm.pretrain import train
from tost_lm.pretrain.validation import Validation
from tost_lm.tasks.in_training import TasksInTraining

Times = Callable[[int], int]
RecordFault = Callable[[str, int, str], None]


def before_step(number: int, fault: Callable[[Any], None]) -> None:
    """Call `fault(engine)` in this rank right before training step `number`, counted from 1 in this launch."""
    train_step, steps = train.train_step, 0

    def step(engine: Any, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == number:
            fault(engine)
        return train_step(engine, *arguments)

    train.train_step = step  # pyright: ignore[reportAttributeAccessIssue]


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
    x = next(tensor for what, tensor in engine.own_state() if what.startswith(kind))
    x.view(torch.int32).view(-1)[7] ^= 1 << bit if bit < 31 else -(1 << 31)


def inject_at(at_rank: int, number: int, fault: Callable[[Any], None], rank: int) -> None:
    if rank == at_rank:
        before_step(number, fault)


@pytest.mark.quick
def test_all_ranks_skip_an_infinity_of_one_rank(workplace: Path, times: Times, record_fault: RecordFault):
    for count in range(times(5)):
        for fault, reason in ((infinite_loss, "loss is "), (infinite_gradient, "gradient norm is ")):
            name, step = f"{fault.__name__}{count}", 2 + count % 7
            words = (f"run.name={name}", "train.steps=10", f"parallel.zero_stage={count % 4}")
            with launch(workplace, 2, *words, inject=partial(inject_at, count % 2, step, fault)) as running:
                assert running.wait() == [0, 0], running.output()
            (skipped,) = [
                row for row in read_rows(workplace / f"runs/{name}/events.jsonl") if row["event"] == "skipped"
            ]
            assert skipped["step"] == step
            assert skipped["samples"] == [4 * (step - 1), 4 * step - 1]
            assert skipped["why"].startswith(reason)
            rows = curve(workplace / f"runs/{name}")
            assert len(rows) == 10
            assert all(row[1] is not None and math.isfinite(row[1]) for row in rows if row[0] != step)
    record_fault(
        "Inf in one rank's loss, in one rank's gradient", 2 * times(5), "all ranks skip it; sample numbers logged"
    )


def always_infinite(rank: int) -> None:
    if rank == 1:
        for number in range(4, 20):
            before_step(number, infinite_loss)


def test_a_run_that_skips_everything_ends(workplace: Path):
    with launch(workplace, 2, "run.abort_after_skips=3", inject=always_infinite) as running:
        assert 2 in running.wait(), running.output()
        assert "step 6: loss is " in running.errors()[0]
        assert "3 steps in a row were skipped (run.abort_after_skips)" in running.errors()[0]


@pytest.mark.slow
def test_a_flipped_bit_ends_the_run_and_a_restart_works(workplace: Path, times: Times, record_fault: RecordFault):
    kinds = ("embedding.weight", "exp_avg of", "exp_avg_sq of")
    for count in range(times(5)):
        stage, lost, bit = (3, 0, 1, 2, 1)[count % 5], count % 2, (7 * count + 3) % 32
        fault = partial(flipped_bit, "" if stage == 0 else kinds[count % 3], bit)
        words = (
            f"run.name=bits{count}", f"parallel.zero_stage={stage}", "run.sdc_check_interval=2", "train.steps=30",
        )  # fmt: skip
        with launch(workplace, 2, *words, inject=partial(inject_at, lost, 15, fault)) as running:
            codes = running.wait()
            assert codes == [2, 2], running.output()
            line = next(line for line in running.errors() if "silent data corruption" in line)
            who = "one of ranks 0-1" if stage == 0 else f"rank {lost}"
            assert re.search(rf"silent data corruption on {who} \({os.uname().nodename}\)", line), line
        assert saved_steps(workplace / f"runs/bits{count}") == [10]
        rows = read_rows(workplace / f"runs/bits{count}/metrics.jsonl")
        assert rows[-1]["step"] <= 15 + (1 if stage == 0 else -1)
        with launch(workplace, 2, *words) as running:
            assert running.wait() == [0, 0], running.output()
    record_fault(
        "a bit flipped in weights or optimizer",
        times(5),
        "detected before the next update (stage 0: in N steps)",
    )


def nan_weights_from(measured: type[Any], rank: int) -> None:
    """The weights become NaN right before the first call of `measured.measure`."""
    measure = measured.measure

    def measure_nan(self: Any, engine: Any, *arguments: Any) -> Any:
        next(engine.module.parameters()).data.fill_(math.nan)
        return measure(self, engine, *arguments)

    measured.measure = measure_nan


def test_an_evaluation_of_nan_weights_ends_the_run_without_a_result(workplace: Path, record_fault: RecordFault):
    needle = ("needle.lengths=[64]", "needle.samples=2", "needle.depths=[0.5]", "needle.keys=1")
    words = ("train.steps=3", "evaluation.interval=3", 'evaluation.tasks=["needle"]')
    words += ("model.positions=none", "model.tssa.denom_bias=head")
    words += tuple(f"evaluation.settings.{setting}" for setting in needle)
    with launch(workplace, 2, *words, inject=partial(nan_weights_from, TasksInTraining)) as running:
        assert running.wait() == [2, 2], running.output()
        assert "the model: its logits are not finite (NaN or infinite)" in running.errors()[0]
    assert read_rows(workplace / "runs/tiny/evaluations.jsonl") == []
    assert saved_steps(workplace / "runs/tiny") == []
    record_fault("weights are NaN in an evaluation", 1, "an error; exit code 2")


def test_a_run_whose_last_validation_loss_is_nan_is_an_error(workplace: Path, record_fault: RecordFault):
    words = ("train.steps=3", "validation.interval=3", "validation.sequences=4", "run.sdc_check_interval=0")
    for inject in (partial(nan_weights_from, Validation), no_fault):  # the second launch has no step left to train
        with launch(workplace, 2, *words, inject=inject) as running:
            assert running.wait() == [2, 2], running.output()
            assert "runs/tiny: the validation loss after the last step is nan" in running.errors()[0]
    record_fault("the last validation loss is NaN", 2, "an error; exit code 2")
