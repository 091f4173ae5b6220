"""All parallel layouts with both optimizers, and further tests on four ranks."""

import pytest
from test_checksums import assert_flips_are_found
from test_evaluation_on_layouts import assert_evaluated_as_one_process
from test_exactness import MODELS, assert_training_equals_one_process
from test_parallel_layouts import GRAD_CLIP, train_in_stages
from test_skipped_steps import assert_all_skip_alike

from tost_lm.testing import run_on_ranks


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("tensor", "sequence"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_four_ranks_train_as_one_process(tensor: int, sequence: int, optimizer: str):
    stages, layout = (0, 1, 2, 3), {"tensor": tensor, "sequence": sequence}
    for records in run_on_ranks(train_in_stages, 4, layout, stages, optimizer, timeout_s=280):
        for record in records:
            record.assert_as_one_process(optimizer, GRAD_CLIP)


@pytest.mark.parametrize(("tensor", "sequence"), [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_every_model_trains_as_one_process_in_float64(tensor: int, sequence: int):
    cases = [(name, optimizer) for name in MODELS for optimizer in ("sgd", "adamw")]
    assert_training_equals_one_process(tensor, sequence, cases)


@pytest.mark.parametrize("settings", [{"zero_stage": 3, "tensor": 2}, {"zero_stage": 1, "sequence": 2}], ids=str)
def test_every_rank_skips_alike_and_nothing_changes(settings: dict[str, int]):
    assert_all_skip_alike(4, settings, bfloat16=False)


def test_every_flipped_bit_is_found_and_named():
    assert_flips_are_found(4, 2, [(0, False), (3, False)])


def test_every_layout_evaluates_as_one_process():
    assert_evaluated_as_one_process([(2, 2), (1, 4)])
