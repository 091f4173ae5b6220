"""All mixes of tensor, sequence and data ranks and ZeRO stages, with both optimizers; and resuming on them."""

import pytest
from test_exactness import MODELS, assert_training_equals_one_process
from test_mixes import GRAD_CLIP, train_in_stages
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
