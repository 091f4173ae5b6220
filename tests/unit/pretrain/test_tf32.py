"""TensorFloat-32 is set in both directions, and never for a CPU."""

from collections.abc import Iterator

import pytest
import torch

from tost_lm.pretrain.loop import set_matmul_precision


@pytest.fixture(autouse=True)
def precision_of_this_process() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize(
    ("tf32", "device", "after"), [(True, "cuda", True), (False, "cuda", False), (True, "cpu", False)]
)
def test_the_setting_replaces_what_the_process_had(before: str, tf32: bool, device: str, after: bool):
    torch.set_float32_matmul_precision(before)
    set_matmul_precision(tf32, torch.device(device))
    assert torch.backends.cuda.matmul.allow_tf32 == after
    assert torch.get_float32_matmul_precision() == ("high" if after else "highest")
