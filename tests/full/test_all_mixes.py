"""All mixes of tensor, sequence and data ranks and ZeRO stages on four ranks, with both optimizers."""

import pytest
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
