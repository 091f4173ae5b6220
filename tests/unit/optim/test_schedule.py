"""The learning rate of each step."""

import math
from typing import Any

import pytest

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.optim.settings import OptimConfig, learning_rate, obstacle_to_schedule, warmup_steps

pytestmark = pytest.mark.quick

CONFIG = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4)


def test_rate_rises_linearly_then_falls_as_half_a_cosine_to_its_end():
    rates = [learning_rate(step, 15, CONFIG) for step in range(15)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[9] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 2)))
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_warm_up_follows_from_the_length_of_the_run_unless_it_is_set():
    assert [warmup_steps(OptimConfig(), steps) for steps in (5, 160, 600_000)] == [0, 16, 2000]
    assert warmup_steps(OptimConfig(warmup_steps=300), 160) == 300


def test_warm_up_from_zero_is_nanogpts_schedule():
    def nanogpt(step: int, warmup: int = 20, last: int = 100) -> float:
        if step < warmup:
            return 6e-4 * step / warmup
        return 6e-5 + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (last - warmup))) * (6e-4 - 6e-5)

    config = OptimConfig(warmup_steps=20, warmup_from_zero=True)
    assert [learning_rate(step, 101, config) for step in range(101)] == pytest.approx([nanogpt(s) for s in range(101)])


def rates(steps: int, **settings: Any) -> list[float]:
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4, **settings)
    return [learning_rate(step, steps, config) for step in range(steps)]


WARMUP = [0.2, 0.4, 0.6, 0.8]


def test_linear_falls_by_equal_amounts_to_its_end():
    assert rates(14, schedule="linear") == pytest.approx([*WARMUP, *(1 - 0.1 * n for n in range(10))])


def test_constant_stays_at_the_peak():
    assert rates(9, schedule="constant") == pytest.approx([*WARMUP, *[1.0] * 5])


def test_wsd_is_stable_up_to_its_last_steps_and_falls_in_each_of_them():
    assert rates(12, schedule="wsd", decay_steps=3) == pytest.approx([*WARMUP, *[1.0] * 5, 0.7, 0.4, 0.1])
    assert rates(5, schedule="wsd", decay_steps=1) == pytest.approx([*WARMUP, 0.1])


@pytest.mark.parametrize(
    ("schedule", "stable"), [({"schedule": "constant"}, 20), ({"schedule": "wsd", "decay_steps": 5}, 15)]
)
def test_the_steps_before_the_decay_have_the_rates_of_any_longer_run(schedule: dict[str, Any], stable: int):
    assert rates(20, **schedule)[:stable] == rates(30, **schedule)[:stable]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_cosine_and_linear_depend_on_the_length_after_the_warm_up(schedule: Any):
    short, long = rates(20, schedule=schedule), rates(30, schedule=schedule)
    assert short[:5] == long[:5]
    assert all(a < b for a, b in zip(short[5:], long[5:20], strict=True))


def test_the_decay_must_fit_between_the_warm_up_and_the_end():
    config = OptimConfig(schedule="wsd", decay_steps=7, warmup_steps=4)
    assert obstacle_to_schedule(config, 11) == ""
    assert obstacle_to_schedule(config, 10) == (
        "optim.decay_steps 7 and a warm-up of 4 steps are more than train.steps 10: lower optim.decay_steps or raise "
        "train.steps"
    )
    assert obstacle_to_schedule(OptimConfig(schedule="constant", warmup_steps=20), 10) == ""  # only a warning


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"schedule": "wsd"}, "optim.schedule wsd needs the length of its decay: set optim.decay_steps"),
        ({"decay_steps": 5}, "optim.decay_steps is set with optim.schedule cosine: set optim.schedule ="),
        ({"schedule": "linear", "lr": 1e-5}, "optim.min_lr 6e-05 is above optim.lr 1e-05; lower it"),
        ({"schedule": "cyclic"}, "schedule: input should be 'cosine', 'linear', 'constant' or 'wsd'"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, Any], problem: str):
    with pytest.raises(ConfigError) as error:
        validate(OptimConfig, settings, "test")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_constant_rate_has_no_least_rate():
    assert learning_rate(9, 10, OptimConfig(lr=1e-5, schedule="constant")) == 1e-5
