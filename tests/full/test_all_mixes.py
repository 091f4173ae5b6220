"""All mixes of tensor, sequence and data ranks and ZeRO stages, with both optimizers; what four ranks do together."""

import pytest
from test_checksums import assert_flips_are_found
from test_evaluation_on_mixes import assert_evaluated_as_one_process
from test_exactness import MODELS, assert_training_equals_one_process
from test_mixes import GRAD_CLIP, train_in_stages
from test_skipped_steps import assert_all_skip_alike
from training_on_mixes import plain_training

from tost_lm.testing import run_on_ranks


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("tensor", "sequence"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_four_ranks_train_as_one_process(tensor: int, sequence: int, optimizer: str):
    stages, mix = (0, 1, 2, 3), {"tensor": tensor, "sequence": sequence}
    for records in run_on_ranks(train_in_stages, 4, mix, stages, optimizer, timeout_s=280):
        for record in records:
            record.assert_equals(plain_training(optimizer, GRAD_CLIP), relative=1e-5)


@pytest.mark.parametrize(("tensor", "sequence"), [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_every_model_trains_as_one_process_in_float64(tensor: int, sequence: int):
    cases = [(name, optimizer) for name in MODELS for optimizer in ("sgd", "adamw")]
    assert_training_equals_one_process(tensor, sequence, cases)


@pytest.mark.parametrize("settings", [{"zero_stage": 3, "tensor": 2}, {"zero_stage": 1, "sequence": 2}], ids=str)
def test_every_rank_skips_alike_and_nothing_changes(settings: dict[str, int]):
    assert_all_skip_alike(4, settings, bfloat16=False)


def test_every_flipped_bit_is_found_and_named():
    assert_flips_are_found(4, 2, [(0, False), (3, False)])


def test_every_mix_evaluates_as_one_process():
    assert_evaluated_as_one_process([(2, 2), (1, 4)])
