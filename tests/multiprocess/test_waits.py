"""Where a training step waits for the device: each place where Python reads a value of a tensor."""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from training_on_layouts import build_engine, train_steps

from tost_lm.parallel.config import ParallelConfig
from tost_lm.testing import run_on_ranks

READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}
ON_THE_HOST = {
    "optimizer.py:_get_value": "AdamW's count of steps, a host tensor",
    "chunked.py:score_gradients": "of the path of CPUs",
    "chunks.py:__init__": "of the path of CPUs: whether slots read a NaN",
}


class Waits(TorchDispatchMode):
    """Counts the functions that read values."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.partition("::")[2] in READS:
            frames = (x for x in reversed(traceback.extract_stack()[:-1]) if "_dynamo" not in x.filename)
            frame = next(x for x in frames if not x.filename.endswith("_compile.py"))
            place = f"{Path(frame.filename).name}:{frame.name}"
            if place not in ON_THE_HOST:
                self.places[place] += 1
        return func(*args, **kwargs or {})


def waits_of_a_step(bfloat16: bool) -> dict[str, int]:
    engine = build_engine(ParallelConfig(zero_stage=1 if bfloat16 else 0), "adamw", bfloat16=bfloat16)
    train_steps(engine, "adamw", range(1))
    with Waits() as waits:
        train_steps(engine, "adamw", range(1, 2))
    return dict(waits.places)


@pytest.mark.parametrize(
    ("bfloat16", "of_the_norm"),
    [
        (False, {"zero.py:_clip_and_record_norm": 1}),
        (True, {
            "utils.py:is_invalid_grad_norm": 1, "utils.py:clip_tensors_by_global_norm": 1,
            "zero.py:_update_unless_skipped": 1, "zero.py:__call__": 1,
        }),
    ],
)  # fmt: skip
def test_a_step_of_two_micro_batches_reads_the_loss_and_the_gradient_norm_at_its_end(
    bfloat16: bool, of_the_norm: dict[str, int]
):
    [waits] = run_on_ranks(waits_of_a_step, 1, bfloat16)
    assert waits == {"step.py:train_step": 1, **of_the_norm}
